import pytest
import torch


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(scope="session")
def machine():
    from attn_exp.worker.machine.device import Machine

    opened = Machine.open("cuda")
    opened.ceilings_for("bfloat16")
    return opened
