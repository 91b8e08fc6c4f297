"""Memory of the GPU, for tests that need much of it."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

GIB = 2**30
MUCH = 8 * GIB


@pytest.fixture
def need_memory() -> Iterator[Callable[[int], None]]:
    """A function that skips the test where the GPU has not so many bytes free.

    Of processes beside each other (`pytest -n 8`) one at a time runs a test that needs MUCH, and
    has given the memory back before the next one looks.
    """
    with contextlib.ExitStack() as until_the_end:

        def need(bytes_: int) -> None:
            if bytes_ > MUCH:
                until_the_end.enter_context(_one_process())
            free, _ = torch.cuda.mem_get_info()
            if free < bytes_:
                torch.cuda.empty_cache()
                free, _ = torch.cuda.mem_get_info()
            if free < bytes_:
                pytest.skip(
                    f"needs {bytes_ / GIB:.0f} GiB of GPU memory, {free / GIB:.0f} are free"
                )

        yield need


@contextlib.contextmanager
def _one_process() -> Iterator[None]:
    path = Path(tempfile.gettempdir()) / f"fused_op_tests_{os.getuid()}.lock"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed
        try:
            yield
        finally:
            gc.collect()
            torch.cuda.empty_cache()
