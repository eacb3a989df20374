from pathlib import Path

import pytest

from twinhull.system.load import Described, load

FILES = Path(__file__).parent / "files"


@pytest.fixture
def shop() -> Described:
    """A system with workloads of both kinds and one endpoint."""
    return load(FILES / "shop.yaml")


@pytest.fixture
def everything() -> Described:
    """A system that uses each section and each spelling."""
    return load(FILES / "everything.yaml")
