import os
from pathlib import Path

import pytest
from chromium import chromium


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def browser():
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="session")
def axe():
    """The program of axe-core, which `make browser-test` fetches: MPL 2.0, so that it is not kept here."""
    return Path(os.environ["AXE"]).read_text()
