"""A copy of the sources, for tests that change or build them."""

import shutil
from pathlib import Path

import pytest

from tests.packaging.builds import ROOT


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A source tree, without a module."""
    for folder in ("fused_op", "csrc"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    shutil.copy(ROOT / "setup.py", tmp_path)
    return tmp_path
