from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder where objects are built once for all tests."""
    return tmp_path_factory.mktemp("objects")
