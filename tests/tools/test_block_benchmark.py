"""benchmarks/block.py measures what it says, on a CPU at tiny sizes; its tables find their way."""

import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import block, block_table, tables
from benchmarks.block_variants import VARIANTS

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
SEQUENCES, HIDDEN = (4, 32), 128
ACTIVATION = 4 * 32 * HIDDEN * 2
OURS = ("fused_op", "fused_op, separate add", "fused_op, memory_efficient")


class CpuMeter:
    """Counts what the profiler sees of the CPU's allocator."""

    def start(self):
        gc.collect()  # what was allocated before may not be counted when it goes
        self.total = self.top = 0
        self._open()

    def now(self):
        self._close()
        self._open()
        return self.total

    def peak(self):
        self._close()
        return self.top

    def _open(self):
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._profile.start()

    def _close(self):
        self._profile.stop()
        events = self._profile.profiler.kineto_results.events()
        changes = [event for event in events if event.name() == "[memory]"]
        for event in sorted(changes, key=lambda event: event.start_ns()):
            self.total += event.nbytes()
            self.top = max(self.top, self.total)


@pytest.fixture(scope="module", autouse=True)
def short_collections():
    """A collection looks only at what is made here: all that torch has imported takes it 0.2 s."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def norm_row(op):
    return block.measure_norm(op, HIDDEN, "eager", CPU, CpuMeter(), SEQUENCES)


def block_row(op):
    return block.measure_block(op, HIDDEN, "eager", CPU, CpuMeter(), SEQUENCES, 2, 1)


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_memory_efficient_holds_no_input(op):
    """Catches a measurement that keeps what the norm would let go, or misses what it keeps."""
    variants = norm_row(op)["variants"]
    held = {name: variants[name]["held_bytes"] / ACTIVATION for name in (OURS[0], OURS[2])}
    # Beside the tensors of rows x cols, one or two statistics a row, in float32.
    assert held["fused_op"] == pytest.approx(2, abs=0.1)
    assert held["fused_op, memory_efficient"] == pytest.approx(1, abs=0.1)
    assert variants["PyTorch"]["held_bytes"] > 1.9 * ACTIVATION
    for name in held:
        assert variants[name]["peak_bytes"] > variants[name]["held_bytes"]
    assert "MissingOp" in variants["fused_op, separate add"]["failed"]


@pytest.mark.parametrize("op", block.MEMORY_OPS[2:])
def test_fused_addition_holds_output_and_sum(op):
    """Catches a variant that silently drops out, and a dropout that is not measured."""
    variants = norm_row(op)["variants"]
    assert set(variants) == {variant.name for variant in VARIANTS}
    assert variants["fused_op"]["held_bytes"] / ACTIVATION == pytest.approx(2, abs=0.1)


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_dropout_of_pytorch_holds_a_mask(norm):
    """Catches a dropout that is not measured."""
    plain, dropped = (norm_row(f"{kind}add_{norm}")["variants"] for kind in ("", "dropout_"))
    for name, more in (("PyTorch", 0.4), ("fused_op", 0)):  # a mask has a byte or more an element
        held = (dropped[name]["held_bytes"] - plain[name]["held_bytes"]) / ACTIVATION
        assert held >= more, name
        assert more or held < 0.1, name


@pytest.fixture(scope="module")
def result():
    """A made-up run of a GPU, with rows that are measured here."""
    rows = [block_row(op) for op in block.BLOCK_OPS]
    environment = {
        "device": "Some GPU", "device_type": "cuda", "driver": "1", "torch": "2", "cuda": "13",
        "nvcc": "13", "peers": {"Liger": "0.1"}, "commit": "c" * 40, "date": "2030-01-01T00:00:00",
    }  # fmt: skip
    made = {"environment": environment, "blocks": rows, "norms": [norm_row("layer_norm")]}
    for row in (*made["blocks"], *made["norms"]):
        row["variants"]["Liger"] = {"failed": "not here"}
    return json.loads(json.dumps(made))


def test_block_is_timed_and_weighed(result):
    """Catches a variant without a figure; how large it is, is not asserted."""
    for row in result["blocks"]:
        for name in ("PyTorch", *OURS):
            figures = row["variants"][name]
            assert figures["us"] > 0 and len(figures["rounds_us"]) == 2
            assert 0 < figures["held_bytes"] < figures["peak_bytes"]
        # Both norms of the block let their inputs go, which nothing else holds.
        held = [row["variants"][name]["held_bytes"] / ACTIVATION for name in OURS[1:]]
        assert held[0] - held[1] == pytest.approx(1, abs=0.1)


def test_variants_compute_the_same(result):
    """Catches a variant that is light or fast because it computes something else."""
    for op in block.BLOCK_OPS:
        found = {}
        for variant in VARIANTS[:-1]:
            torch.manual_seed(0)
            module = block.Block(64, lambda variant=variant, op=op: variant.build(op, 64)).double()
            torch.manual_seed(1)
            inputs = torch.randn(2, 2, 8, 64, dtype=torch.double)
            found[variant.name] = torch.cat(module(*inputs))
        for output in found.values():
            torch.testing.assert_close(output, found["PyTorch"])


def test_tables(result):
    text = block_table.tables(result)
    assert "| step of a block with | PyTorch | fused_op |" in text
    assert (
        "| add_rms_norm, 128 x 128, eager | " in text and "| layer_norm, 128 x 128, eager |" in text
    )
    figures = result["blocks"][0]["variants"]
    ratio = figures["fused_op"]["us"] / figures["PyTorch"]["us"]
    assert f"{100 * figures['fused_op']['spread']:.1f} % ({ratio:.3f})" in text
    assert "Liger" not in text  # nothing measured: no column


def test_the_page_shows_the_newest_result(result, tmp_path):
    """Catches a table that comes from an older file, or from none."""
    page, files = tmp_path / "docs/performance.md", tmp_path / "block"
    page.parent.mkdir()
    (table,) = (table for table in tables.TABLES if table.name == "block")
    table = table._replace(folder=files)
    page.write_text("a\n<!-- block:begin -->\n<!-- block:end -->\nz\n")
    assert tables.write(table, pages=tmp_path)
    assert tables.NOT_MEASURED in page.read_text()
    files.mkdir()
    older = json.loads(json.dumps(result))
    older["environment"] |= {"device": "Old GPU", "date": "2029-01-01T00:00:00"}
    (files / "b.json").write_text(json.dumps(older))
    (files / "a.json").write_text(json.dumps(result))
    assert tables.write(table, pages=tmp_path)
    assert not tables.write(table, pages=tmp_path)
    text = page.read_text()
    assert text.startswith("a\n<!-- block:begin -->\n\nSome GPU, driver 1") and "step of a" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="would measure for minutes")
def test_without_a_gpu_it_says_so(tmp_path):
    command = [sys.executable, "-m", "benchmarks.block", "--json", str(tmp_path / "x.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "no CUDA device" in done.stderr
