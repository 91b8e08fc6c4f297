"""The bits of long rows under the plans of GPUs with fast memory (H200) and without (H100)."""

import os
import subprocess
import sys

import pytest

from tests.case import SEED
from tests.ops import DEVICES


def lines_of(memory: str) -> list[list[str]]:
    environment = os.environ | {"FUSED_OP_FAST_MEMORY": memory, "FUSED_OP_SEED": str(SEED)}
    script = [sys.executable, "-m", "tests.numerics.memory_bits"]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines()]


@pytest.mark.skipif("cuda" not in DEVICES, reason="needs a GPU")
def test_either_memory_gives_the_same_bits() -> None:
    """Catches a kernel that this GPU never plans and that is wrong, or adds in another order."""
    slow, fast = lines_of("0"), lines_of("1")
    assert {kernel for *_, kernel, _ in slow} == {"forward_cluster_kernel"}
    assert {kernel for *_, kernel, _ in fast} == {
        "forward_cluster_kernel",
        "forward_in_turn_kernel",
    }
    assert [(*call, digest) for *call, _, digest in slow] == [
        (*call, digest) for *call, _, digest in fast
    ]
