"""Fixtures that several files of this room use."""

import gc

import pytest

import fused_op


@pytest.fixture
def override_ends():
    """No test leaves ``override_torch`` on."""
    yield
    gc.collect()
    assert not fused_op._override._open
