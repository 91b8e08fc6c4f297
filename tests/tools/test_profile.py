"""What benchmarks/profile.py reads from Nsight Compute."""

import csv
import io

import pytest

from benchmarks import profile

NAME = "void fused_op::cuda::{}_kernel<float, fused_op::LayerNorm>(fused_op::NormForwardArgs)"


def log_of(*kernels: tuple[str, dict[str, str]]) -> str:
    """What `ncu --csv --page raw` prints of kernels with those values, and 1 for all others."""
    text = io.StringIO()
    writer = csv.writer(text, quoting=csv.QUOTE_ALL)
    writer.writerow(["ID", "Kernel Name", *profile.METRICS])
    writer.writerow(["", "", *("unit" for _ in profile.METRICS)])
    for number, (name, values) in enumerate(kernels):
        line = [values.get(metric, "1") for metric in profile.METRICS]
        writer.writerow([number, NAME.format(name), *line])
    return "==PROF== Connected\n" + text.getvalue()


def test_each_kernel_gets_its_shape() -> None:
    """Catches kernels that are counted to the shape before or after theirs."""
    shapes = [
        ["layer_norm", "bfloat16", "8", "16", "forward"],
        ["layer_norm", "bfloat16", "9", "17", "backward"],
    ]
    log = log_of(("forward", {}), ("forward", {}), ("backward", {}), ("backward_few", {}))
    found = profile.kernels(log, shapes)
    assert [(row["rows"], row["mode"]) for row in found] == [
        (8, "forward"),
        (9, "backward"),
        (9, "backward"),
    ]
    assert [row["kernel"].partition("_kernel")[0] for row in found] == [
        "forward",
        "backward",
        "backward_few",
    ]


def test_table() -> None:
    """Catches thousands separators that are read as decimals, and waits out of order."""
    values = {
        "gpu__time_duration.sum": "1,000",
        "dram__bytes_read.sum": "1,500,000",
        "dram__bytes_write.sum": "500,000",
        "smsp__inst_executed.sum": "2,500,000",
        profile.STALL.format("barrier"): "3.25",
    }
    shape = ["rms_norm", "float32", "4", "8", "forward"]
    (row,) = profile.kernels(log_of(("forward", values)), [shape])
    text = profile.table([row])
    assert "| rms_norm forward float32 4x8 | forward | 2.00 | 2.5 |" in text
    assert "| a barrier 3.2, " in text


def test_a_missing_kernel_is_no_shift() -> None:
    """Catches figures that slide to another shape when a kernel was not profiled."""
    shapes = [["layer_norm", "bfloat16", "8", "16", "forward"]] * 2
    with pytest.raises(ValueError, match="1 forwards for 2 shapes"):
        profile.kernels(log_of(("forward", {})), shapes)
    with pytest.raises(ValueError, match="belongs to none of 2 shapes"):
        profile.kernels(log_of(*[("forward", {})] * 3), shapes)
