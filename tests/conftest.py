"""What all tests share."""

import contextlib
import copy
import gc
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from omegaconf import OmegaConf

# To look through what collecting imports again and again takes a quarter of its time; it stays to the end.
gc.disable()
# A shell starts what is in the background deaf to Ctrl-C, nohup to SIGHUP. So would be whatever the tests start and
# interrupt, but where Python handles a signal: then new programs have its default.
for _number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, lambda *_: None)
# How long a generated example takes says nothing on a machine that runs other tests beside.
# The tests for GPUs generate nothing, and run where only the package's own needs are installed.
with contextlib.suppress(ImportError):
    from hypothesis import settings

    settings.register_profile("attn_exp", deadline=None)
    settings.load_profile("attn_exp")


def pytest_collection_finish() -> None:
    """Collect garbage again, that of the tests."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _parsed_once() -> Iterator[None]:
    """Parse each text of a configuration once in this process.

    Hydra parses two dozen files for each combination of choices, which is a third of the time of a command here.
    """
    parsed: dict[str, Any] = {}
    original = OmegaConf.load

    def load(file: Any) -> Any:
        if not hasattr(file, "read"):
            return original(file)
        start, text = file.tell(), file.read()
        if text not in parsed:
            file.seek(start)
            parsed[text] = original(file)
        return copy.deepcopy(parsed[text])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OmegaConf, "load", load)
        yield
