"""What all tests share."""

import contextlib
import functools
import gc
import os
import pickle
import signal
import sys
from collections.abc import Iterator
from typing import Any

import omegaconf._utils
import omegaconf.base
import pytest
from omegaconf import OmegaConf

# To look through what collecting imports again and again takes a quarter of its time; it stays to the end.
gc.disable()
# A shell starts what is in the background deaf to Ctrl-C, nohup to SIGHUP. So would be whatever the tests start and
# interrupt, but where Python handles a signal: then new programs have its default.
for _number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, lambda *_: None)
# How long a generated example takes says nothing on a machine that runs other tests beside. The examples are those of
# every run, so that a failure is the change's; `make fuzz` draws others.
# As in an environment that is activated: what a sweep says where to find is a test's own.
os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
# The tests for GPUs generate nothing, and run where only the package's own needs are installed.
with contextlib.suppress(ImportError):
    from hypothesis import settings

    settings.register_profile("attn_exp", deadline=None, derandomize="ATTN_EXP_FUZZ" not in os.environ)
    settings.load_profile("attn_exp")


# Files that take long, which several processes begin with: one that came last would run alone.
_LONGEST = ("cheats", "launchers", "hunt", "docs_run", "identity", "measure", "docs", "triton_kernel", "workloads")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest."""
    order = {f"test_{name}": place for place, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))


def pytest_collection_finish() -> None:
    """Collect garbage again, that of the tests."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _parsed_once() -> Iterator[None]:
    """Parse each text of a configuration, and each `${...}` in one, once in this process.

    Hydra parses two dozen files for each combination of choices, and OmegaConf what they refer to for each job: half of
    the time of a command here. What pickle copies takes a fifth of the time of a deep copy.
    """
    parsed: dict[str, bytes] = {}
    original = OmegaConf.load

    def load(file: Any) -> Any:
        if not hasattr(file, "read"):
            return original(file)
        start, text = file.tell(), file.read()
        if text not in parsed:
            file.seek(start)
            parsed[text] = pickle.dumps(original(file))
        return pickle.loads(parsed[text])

    # Trees of the grammar, which nothing changes.
    parse = functools.cache(omegaconf.base.parse)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OmegaConf, "load", load)
        for module in (omegaconf.base, omegaconf._utils):
            patch.setattr(module, "parse", parse)
        yield


@pytest.fixture(scope="session", autouse=True)
def _patient() -> Iterator[None]:
    """Wait for MLflow's store for as long as a busy machine takes; tests of the limit set their own."""
    try:
        from attn_exp.tracking import location
    except ImportError:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(location, "_PATIENCE_S", 300.0)
        yield
