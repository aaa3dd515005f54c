import pytest
import torch


def pytest_collection_modifyitems(config, items):
    if torch.cuda.is_available():
        return
    needy = [item for item in items if item.get_closest_marker("gpu")]
    items[:] = [item for item in items if not item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=needy)


@pytest.fixture(scope="session")
def machine():
    from attn_exp.worker.machine.device import Machine

    opened = Machine.open("cuda")
    opened.ceilings_for("bfloat16")
    return opened
