"""The folder of compiled kernels, empty for each test that asks for it."""

from pathlib import Path

import pytest


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the cache, which the first kernel creates."""
    monkeypatch.setenv("FUSED_OP_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"
