"""What all tests share: how long a generated example takes says nothing on a machine that runs other tests beside."""

import contextlib

# The tests for GPUs generate nothing, and run where only the package's own needs are installed.
with contextlib.suppress(ImportError):
    from hypothesis import settings

    settings.register_profile("attn_exp", deadline=None)
    settings.load_profile("attn_exp")
