"""examples/train_llama.py runs, and its curves keep to its bound."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_losses_keep_to_the_bound(tmp_path):
    """Catches norms that train a model elsewhere than PyTorch's, and a run that loses a part."""
    files = ["--json", str(tmp_path / "run.json"), "--output", str(tmp_path / "run.png")]
    command = [sys.executable, "examples/train_llama.py", "--small", "--device", "cpu", *files]
    done = subprocess.run(
        [*command, "--steps", "10"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    result = json.loads((tmp_path / "run.json").read_text())
    variants = result["variants"]
    assert set(variants) == {"torch.nn.RMSNorm", "batches reversed", "fused_op"}
    for variant in variants.values():
        assert len(variant["losses"]) == 10 and variant["ms"] > 0
        assert variant["losses"][-1] < variant["losses"][0]
    # So few steps amplify nothing: the bf16 roundings of one step (2^-8 of single values) are what
    # may differ, averaged over 512 tokens.
    assert result["differences"]["fused_op"] < 2**-8
    assert result["differences"]["fused_op"] <= result["bound"]
