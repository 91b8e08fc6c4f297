"""A sample of the kernels that are compiled at first use: none of them spills registers.

The build fails on a spill of the kernels in its tables; nobody sees those that are compiled on a
user's machine. Catches a plan that gives a lane more than its registers hold, for a width, a
combination of dtypes or an option that no other test compiles. No GPU is needed.
"""

import random
import re

import pytest

import fused_op_cuda
from tests.kernels.toy_kernel import needs_nvrtc

ARCH, SHARED_BYTES, MULTIPROCESSORS = 90, 227 << 10, 132
EACH = 40  # calls, forward and backward


def random_call(g: random.Random, backward: bool) -> dict:
    """Arguments of `_plan`, of any width and combination that the ops take."""
    rows = g.choice(["f16", "bf16", "bf16", "f32", "f32", "f64"])
    others = {"f64": ["f64"], "f32": ["f32", "f16", "bf16"]}.get(rows, [rows, "f32"])
    residual = g.choice(["", "", *others[:1], "f64" if rows == "f64" else "f32"])
    dropout = g.random() < 0.3
    step = g.choice([1, 2, 8, 8, 16])
    return {
        "backward": backward,
        "centred": g.random() < 0.5,
        "rows": g.choice([1, 300, 100_000]),
        "cols": max(round(2 ** g.uniform(3, 17 if backward else 14)) // step * step, step),
        "input": rows,
        "residual": residual,
        "parameters": g.choice([rows, "f64" if rows == "f64" else "f32"]),
        "output": g.choice(others),
        "rounding": g.choice(["once", "before_weight"]),
        "dropout": dropout,
        "memory_efficient": backward and not residual and not dropout and g.random() < 0.3,
        "aligned": g.random() < 0.7,
        "multiprocessors": MULTIPROCESSORS,
        "shared_bytes": SHARED_BYTES,
    }


def sample(backward: bool) -> list[tuple[dict, dict, str, str]]:
    """(call, plan, header, name) of kernels that differ; those of the extension are built."""
    g = random.Random(5 if backward else 1)  # samples that have every option
    found = {}
    while len(found) < EACH:
        call = random_call(g, backward)
        plan, kernels = fused_op_cuda._plan(**call)
        for header, name, core in kernels:
            if not core and "form" not in plan:  # forward of long rows: long_sample()
                found.setdefault(name, (call, plan, header, name))
    return list(found.values())


def allowance(call: dict, plan: dict) -> int:
    """Bytes that a thread may spill, by rule; none in most kernels.

    Forward gives an SM as many threads as registers nearly suffice for, where a lane has most
    elements. In backward, the sums of the parameters' gradients stay in registers, and Philox takes
    what is left. Rows by words are the worst, as it is called for every element or two. Pieces of
    float64 rows take two registers for each value and for each address of a store.
    """
    elements = plan["pack"] * plan["vectors"] * (2 if call["input"] == "f64" else 1)
    if not call["backward"]:
        heavy = elements >= 24 or (call["dropout"] and elements >= 16)
        return 48 if heavy and not plan["few"] else 0
    if "pieces" in plan:
        words = (call["residual"] or call["dropout"]) and plan["move"] != 0
        return 16 if words or call["input"] == "f64" else 0
    mixed = len({call["input"], call["residual"] or call["input"], call["output"]}) > 1
    if call["dropout"]:
        some = (mixed and call["centred"]) or call["input"] == "f64"
        return 1536 if elements >= 24 else 384 if elements >= 16 else 96 if some else 0
    return 64 if mixed and call["residual"] and elements >= 16 else 0


def long_sample() -> list[tuple[dict, dict, str, str]]:
    """The same of rows that do not fit into a CTA, forward; some that may come in turn."""
    g = random.Random(3)
    found = {}
    while len(found) < EACH or len({plan["form"] for _, plan, _, _ in found.values()}) < 3:
        call = random_call(g, backward=False) | {"arch": g.choice([80, ARCH, ARCH, ARCH, 120])}
        call["cols"] *= 2 ** g.randint(0, 5)
        call["rows"] = g.choice([1, 100, 1_000, 100_000])
        if g.random() < 0.2:
            call |= {"residual": "", "dropout": False, "output": call["input"], "aligned": True}
            call |= {"rows": 100_000, "cols": call["cols"] // 16 * 16 + 16, "arch": ARCH}
        plan, kernels = fused_op_cuda._plan(**call)
        for header, name, _ in kernels:
            if "form" in plan:
                found.setdefault(name, (call, plan, header, name))
    return list(found.values())


@needs_nvrtc
@pytest.mark.parametrize("backward", [False, True])
def test_the_sample_is_one(backward):
    """Catches a generator that misses an option, and exceptions that are most of the sample."""
    calls = [(call, plan) for call, plan, _, _ in sample(backward)]
    for name in ("centred", "dropout", "aligned"):
        assert {call[name] for call, _ in calls} == {False, True}
    rounding = sum("RoundsFirst" in name for _, _, _, name in sample(backward))
    assert rounding in range(EACH // 10, EACH // 2)
    assert {call["input"] for call, _ in calls} == {"f16", "bf16", "f32", "f64"}
    assert sum(bool(call["residual"]) for call, _ in calls) in range(EACH // 5, EACH)
    assert sum(allowance(*call) > 0 for call in calls) < EACH / 2


@pytest.mark.slow
@needs_nvrtc
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_no_kernel_spills(backward):
    spilling = 0
    for call, plan, header, name in sample(backward):
        _, _, log = fused_op_cuda._compile(header, name, ARCH)
        spilt = max(int(count) for count in re.findall(r"(\d+) bytes spill", log))
        spilling += spilt > 0
        assert spilt <= allowance(call, plan), f"{name}\n{call}"
    assert spilling <= EACH / 10  # 3 in 100 of a larger sample


@pytest.mark.slow
@needs_nvrtc
@pytest.mark.parametrize("cols", [72, 768, 1024, 4096, 8192])
def test_dropout_of_the_output_spills_nothing(cols):
    """Catches registers that are kept beside the mask: with 72 bytes of spills, 1024 columns took a
    seventh longer."""
    call = random_call(random.Random(1), backward=False) | {"rows": 100_000, "cols": cols}
    call |= {"input": "bf16", "parameters": "bf16", "output": "bf16", "residual": ""}
    call |= {"centred": True, "rounding": "once", "dropout": True, "aligned": True}
    _, ((header, name, _), *_) = fused_op_cuda._plan(**call)
    _, _, log = fused_op_cuda._compile(header, name, ARCH)
    assert re.findall(r"(\d+) bytes spill", log) and not re.search(r"[1-9]\d* bytes spill", log)


@pytest.mark.slow
@needs_nvrtc
def test_no_kernel_of_long_rows_spills():
    """But two: LayerNorm that keeps parameters wider than the row in registers stores nine words;
    float32 rows with a residual and a 16-bit output, whose lanes have eight packs of each."""
    forms = set()
    for call, plan, header, name in long_sample():
        forms.add(plan["form"])
        _, _, log = fused_op_cuda._compile(header, name, ARCH)
        spilt = max(int(count) for count in re.findall(r"(\d+) bytes spill", log))
        in_turn = header == "cuda/forward_in_turn.cuh"
        wide = call["centred"] and call["parameters"] != call["input"]
        types = (call["input"], bool(call["residual"]))
        narrow = types == ("f32", True) and call["output"] != "f32"
        allowed = 104 if in_turn and wide else 48 if narrow else 0
        assert spilt <= allowed, f"{name}\n{call}"
    assert forms == {0, 1, 2}
