"""Any strides, any alignment: a view gives what a dense copy of it gives, and strided rows are read
where they are."""

import math

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from tests.case import Case, make_case
from tests.ops import BF16, F32, PAIRS, Pair

COLS = 130  # neither a multiple of a vector nor of a warp


def strided_rows(t: Tensor) -> Tensor:
    """Rows inside wider rows of NaN: one element too many shows."""
    wide = t.new_full((*t.shape[:-1], t.shape[-1] + 14), math.nan)
    wide[..., 6:-8] = t
    return wide[..., 6:-8]


def every_third_row(t: Tensor) -> Tensor:
    wide = t.new_full((3 * t.shape[0], *t.shape[1:]), math.nan)
    wide[1::3] = t
    return wide[1::3]


def transposed(t: Tensor) -> Tensor:
    return t.transpose(0, -1).contiguous().transpose(0, -1)


def every_second_column(t: Tensor) -> Tensor:
    wide = t.new_full((*t.shape[:-1], 2 * t.shape[-1]), math.nan)
    wide[..., ::2] = t
    return wide[..., ::2]


def guarded(t: Tensor, offset: int = 0) -> Tensor:
    """Dense, `offset` elements past an aligned address, with NaN on both sides."""
    memory = t.new_full((64 + offset + t.numel() + 64,), math.nan)
    inside = memory[64 + offset : 64 + offset + t.numel()].view(t.shape)
    inside.copy_(t)
    return inside


def expanded_rows(t: Tensor) -> Tensor:
    return t[:1].expand(t.shape)


def expanded_columns(t: Tensor) -> Tensor:
    return t[..., :1].expand(t.shape)


def negated_lazily(t: Tensor) -> Tensor:
    return torch._neg_view(-t)


LAYOUTS = [strided_rows, every_third_row, transposed, every_second_column, guarded]
LAYOUTS += [expanded_rows, expanded_columns, negated_lazily]


def rearranged(case: Case, layout, names: tuple[str, ...] = ("input", "residual", "dy")) -> Case:
    """The case with views of that layout; the values are the same, unless the view repeats some."""
    inputs = {
        name: layout(t) if t is not None and name in names else t for name, t in case.inputs.items()
    }
    grads = tuple(layout(g) for g in case.grads) if "dy" in names else case.grads
    return Case(case.op, inputs, grads, case.eps, case.normalized_shape, f"({layout.__name__})")


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
def test_layout_of_rows(op, device, layout) -> None:
    """Catches a stride that is ignored, a neighbour that is read, a lazy minus that is lost: in
    each tensor with rows alone and in all of them."""
    rows = ("input", "residual", "dy") if op.adds else ("input", "dy")
    for pair in PAIRS:
        case = make_case(op, (12, COLS), pair, device)
        for names in (*((name,) for name in rows), rows):
            view = rearranged(case, layout, names)
            view.check(view.run())
            view.check(view.run(()))


@pytest.mark.parametrize("layout", [every_second_column, guarded], ids=lambda f: f.__name__)
def test_layout_of_parameters(op, device, pair, layout) -> None:
    """Catches parameters that are read as if dense, or beyond their end."""
    case = rearranged(make_case(op, (12, COLS), pair, device), layout, op.parameters)
    case.check(case.run())


def test_expanded_parameters(op, device, pair) -> None:
    """Catches a stride of 0 in weight or bias that is read as 1: one number for all columns."""
    case = make_case(op, (12, COLS), pair, device)
    one = {name: case.inputs[name][:1].expand(COLS) for name in op.parameters}
    case = case.with_inputs(**one)
    case.check(case.run())


@pytest.mark.parametrize("cols", [64, 1000, 4096])
def test_misaligned(op, device, cols) -> None:
    """Catches vector accesses at addresses that do not allow them, and tails beside them: each
    tensor 0 to 7 elements past an aligned address, in step and out of step."""
    for pair in PAIRS:
        case = make_case(op, (5, cols), pair, device)
        for offset in range(1, 8):
            for step in (0, 1):  # the same offset everywhere, or another one in each tensor
                offsets = [(offset + step * i) % 8 for i in range(len(case.inputs) + 2)]
                inputs = {
                    name: guarded(t, offsets[i]) for i, (name, t) in enumerate(case.inputs.items())
                }
                grads = tuple(guarded(g, offsets[-1 - i]) for i, g in enumerate(case.grads))
                view = Case(op, inputs, grads, note=f"(offsets {offsets})")
                view.check(view.run())


def test_guarded_rows(op, device) -> None:
    """Catches reads beyond the last column or before the first, at widths around a vector."""
    for pair in PAIRS:
        for cols in (1, 2, 3, 5, 7, 8, 9, 15, 17, 31, 33, 63, 65, 127, 129, 255, 257, 1023, 1025):
            case = make_case(op, (3, cols), pair, device)
            for layout in (guarded, strided_rows):
                view = rearranged(case, layout, ("input", "residual", "dy", "weight", "bias"))
                view.check(view.run())


def test_normalized_shape(op, device, pair) -> None:
    """Catches rows of the wrong length where several dimensions are normalised together, with
    parameters of that shape, of which some are absent, and without any."""
    for absent in ((), *((name,) for name in op.parameters), op.parameters):
        case = make_case(op, (3, 4, 5, 6), pair, device, absent, normalized_shape=(5, 6))
        check_beside_flat(case)
        check_beside_flat(rearranged(case, transposed))
    if pair.rows is F32:
        check_beside_flat(make_case(op, (3, 4), pair, device, normalized_shape=(3, 4)))


def check_beside_flat(case: Case) -> None:
    """A dense [rows, cols] call gives the same bits; and the flat call is right."""
    results, size = case.run(), (case.rows, case.cols)
    flat = {
        name: None if t is None else t.reshape(-1 if name in case.op.parameters else size)
        for name, t in case.inputs.items()
    }
    flat_case = Case(case.op, flat, tuple(g.reshape(size) for g in case.grads), note=case.note)
    flat_results = flat_case.run()
    flat_case.check(flat_results)
    for name, t in results.items():
        like = case.inputs[name.removeprefix("grad_") if "grad_" in name else "input"]
        assert t.shape == like.shape, f"{case}: {name} has shape {list(t.shape)}"
        assert t.is_contiguous(), f"{case}: {name} has strides {t.stride()}"
        same = torch.equal(t.flatten(), flat_results[name].flatten())
        assert same, f"{case}: {name} is not that of dense rows"


def test_channels_last(op, device, pair) -> None:
    """Catches a channels_last input that is read in memory order, or results in its strides, which
    the output of RMS norm alone has, as PyTorch's."""
    case = make_case(op, (2, 3, 4, 8), pair, device)
    case = rearranged(case, lambda t: t.to(memory_format=torch.channels_last))
    assert not case.inputs["input"].is_contiguous()
    results = case.run()
    if not op.centred and not op.adds:
        assert results["output"].is_contiguous(memory_format=torch.channels_last)
        results["output"] = results["output"].contiguous()
    case.check(results)


def test_grad_of_a_sum(op, device, pair) -> None:
    """Catches a gradient with strides of 0, as .sum() and .mean() send, that is read as dense."""
    case = make_case(op, (12, COLS), pair, device)
    one = torch.ones((), dtype=pair.rows, device=device).expand(12, COLS)
    case = Case(op, case.inputs, (one,) * len(case.grads), note="(sum)")
    case.check(case.run())


@pytest.mark.parametrize("pair", [Pair(F32, F32), Pair(BF16, BF16)], ids=str)
def test_strided_rows_are_not_copied(op, device, pair) -> None:
    """Catches a hidden copy of q and k views: forward allocates its outputs, backward the gradient,
    and nothing else of that size. A transposed input shows that a copy would be seen."""
    case = make_case(op, (256, 1024), pair, device)
    size = case.inputs["input"].nbytes
    outputs = 2 if op.adds else 1
    names = ("input", "residual") if op.adds else ("input",)
    for layout, copies in ((strided_rows, 0), (every_third_row, 0), (transposed, len(names))):
        view = rearranged(case, layout)
        leaves = view.leaves(names)
        made, forward = allocated(device, op.fused, *leaves.values(), **view.options)
        made = made if op.adds else (made,)
        wanted = [leaves[name] for name in names]
        _, backward = allocated(device, torch.autograd.grad, made, wanted, view.grads)
        slack = size // 4  # statistics; no copy fits in it
        for what, bytes_, at_least in (("forward", forward, outputs), ("backward", backward, 1)):
            found = f"{view}: {what} allocates {bytes_ / size:.2f} times the input"
            if copies:
                assert bytes_ >= (at_least + 1) * size, f"{found}: this test sees no copies"
            else:
                assert at_least * size <= bytes_ <= at_least * size + slack, found


def allocated(device: str, function, *args, **kwargs) -> tuple:
    """What it returns, and how many bytes it allocates while it runs, freed again or not."""
    if device == "cuda":
        counter = "allocated_bytes.all.allocated"
        before = torch.cuda.memory_stats()[counter]
        result = function(*args, **kwargs)
        return result, torch.cuda.memory_stats()[counter] - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = function(*args, **kwargs)
    events = profiler.profiler.kineto_results.events()
    return result, sum(max(e.nbytes(), 0) for e in events if e.name() == "[memory]")
