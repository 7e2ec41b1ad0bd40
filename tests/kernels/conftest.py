"""What the tests of kernels share."""

from pathlib import Path

import pytest

from strop.evals.behaviour.sandbox import isolation_missing

isolated = pytest.mark.skipif(
    isolation_missing() is not None, reason=f"programs cannot be isolated here: {isolation_missing()}"
)


@pytest.fixture(scope="session")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder of compiled objects."""
    return tmp_path_factory.mktemp("objects")
