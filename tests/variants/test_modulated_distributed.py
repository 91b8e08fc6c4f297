"""Modulated norms and gated residuals on DTensors: several processes give the numbers of one.

Catches entries that meet another shard's rows, a gradient of entries that is not summed over the
ranks that share them, and entries that fit the shards and not the whole.
"""

import contextlib
import sys

import pytest
import torch

if not torch.distributed.is_available() or sys.platform == "win32":
    pytest.skip("torch has no torch.distributed", allow_module_level=True)

from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing import assert_close

import fused_op
from fused_op import fused_gated_add_layer_norm, fused_gated_add_rms_norm
from tests.calls import loss
from tests.contexts.ranks import mesh_of, ranks_fixture
from tests.variants.test_modulated_norm import FUNCTIONS, arguments, draw, run, tuple_of

two_ranks, four_ranks = ranks_fixture(2), ranks_fixture(4)
every_function = pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)

SHAPE = (5, 3, 2, 8)  # sizes that two ranks divide unevenly
BATCH, FRAMES, TOKENS, WHOLE, PARTIAL = Shard(0), Shard(1), Shard(2), Replicate(), Partial()
ENTRIES = {  # and how many dimensions of the input they have for themselves
    (8,): 0, (1, 8): 0, (1, 1, 1, 8): 0, (5, 8): 1, (5, 1, 1, 8): 1, (5, 3, 8): 2, (5, 3, 1, 8): 2,
    SHAPE: 3,
}  # fmt: skip


def of_entries(rows, own):
    """The placements of their gradients."""
    return tuple(PARTIAL if p.is_shard() and p.dim >= own else p for p in rows)


def check_call(device, function, mesh_shape, inputs, rows, given, own, call=None):
    """`given`: the placements of the entries. `own`: see ENTRIES."""
    mesh = mesh_of(device, mesh_shape)
    names = [name for name in inputs if name in ("scale", "shift", "gate")]
    inputs = {name: t.to(device) for name, t in inputs.items()}
    placed = {}
    for name, t in inputs.items():
        whole = (WHOLE,) * mesh.ndim
        how = given if name in names else rows if t.dim() > 1 else whole
        placed[name] = distribute_tensor(t, mesh, how)
    grads = [draw(*inputs["input"].shape, device=device, what=f"grad{i}") for i in range(2)]
    placed_grads = [distribute_tensor(grad, mesh, rows) for grad in grads]
    alone = run(function, inputs, grads)
    no_need = not call and given == tuple(
        WHOLE if p == PARTIAL else p for p in of_entries(rows, own)
    )
    with CommDebugMode() if no_need else contextlib.nullcontext() as communication:
        found = run(call or function, placed, placed_grads)
    assert not no_need or communication.get_total_counts() == 0, communication.get_comm_counts()
    for name, t in found.items():
        of = name.removeprefix("grad_")
        expected = rows
        if of in names:
            expected = of_entries(rows, own)
        elif of in ("weight", "bias"):
            expected = of_entries(rows, 0)
        assert t.placements == expected, (name, t.placements)
        is_row = of in ("output", "sum", "input", "residual") and device == "cpu"
        bits = {"rtol": 0, "atol": 0} if is_row else {"rtol": 1e-5, "atol": 1e-5}
        assert_close(t.full_tensor(), alone[name], **bits, msg=lambda m, name=name: f"{name}: {m}")


@every_function
@pytest.mark.parametrize("rows", [BATCH, FRAMES, TOKENS, WHOLE], ids=str)
@pytest.mark.parametrize("entries", ENTRIES, ids=str)
def test_entries_on_two_ranks(function, rows, entries, ranks_2):
    inputs, own = arguments(function, SHAPE, entries), ENTRIES[entries]
    like_rows = rows.is_shard() and rows.dim < own
    for given in {rows if like_rows else WHOLE, WHOLE, Shard(len(entries) - 1)}:
        ranks_2.run(check_call, function, (2,), inputs, (rows,), (given,), own)


@pytest.mark.slow
@every_function
@pytest.mark.parametrize("entries", ENTRIES, ids=str)
def test_entries_on_a_mesh_of_two_dimensions(function, entries, ranks_4):
    inputs, own = arguments(function, SHAPE, entries), ENTRIES[entries]
    for rows in ((BATCH, FRAMES), (TOKENS, BATCH), (BATCH, BATCH), (WHOLE, TOKENS)):
        for given in ((WHOLE, WHOLE), (WHOLE, Shard(0))):
            ranks_4.run(check_call, function, (2, 2), inputs, rows, given, own)


@every_function
def test_rank_without_rows(function, ranks_2):
    """Entries are given in different forms: all ranks must see them for the same rows."""
    for sizes, forms, own in (
        ((1, 3, 8), [(8,), (1, 8), (1, 1, 8)], 0),
        ((1, 3, 8), [(1, 3, 8)], 2),
        ((2, 1, 5, 8), [(2, 8), (2, 1, 1, 8), (2, 1, 8)], 1),
        ((2, 1, 5, 8), [(2, 1, 5, 8)], 3),
        ((0, 3, 8), [(0, 8)], 1),
    ):
        inputs = arguments(function, sizes, forms[0])
        names = [name for name in inputs if name in ("gate", "shift", "scale")]
        for i, name in enumerate(names):
            inputs[name] = inputs[name].reshape(forms[i % len(forms)])
        for rows in (BATCH, FRAMES):
            ranks_2.run(check_call, function, (2,), inputs, (rows,), (WHOLE,), own)


def compiled(**inputs):
    torch._dynamo.reset()
    function = torch.compile(fused_gated_add_layer_norm, fullgraph=True, backend="aot_eager")
    return function(**inputs)


def test_compile(ranks_2):
    inputs = arguments(fused_gated_add_layer_norm, SHAPE, (5, 8))
    for rows, given in ((BATCH, BATCH), (TOKENS, WHOLE)):
        placements = (rows,), (given,)
        ranks_2.run(check_call, fused_gated_add_layer_norm, (2,), inputs, *placements, 1, compiled)


def check_one_output(device, compiled):
    """Catches a plain gradient beside DTensors, where the other output leads to none."""
    mesh = mesh_of(device, (2,))
    torch._dynamo.reset()

    def one_of(used, given):
        return fused_gated_add_rms_norm(**given)[used]

    call = torch.compile(one_of, fullgraph=True, backend="aot_eager") if compiled else one_of
    # A shift of its own rows gets the gradient of the output itself, which compiled code has plain.
    for entries in ((5, 8),) if compiled else ((5, 8), SHAPE):
        inputs = arguments(fused_gated_add_rms_norm, SHAPE, entries, device=device)
        for used in (0, 1):
            found = []
            for place in (lambda t: t.clone(), lambda t: distribute_tensor(t, mesh, [BATCH])):
                given = {n: place(t) if t.dim() > 1 else t for n, t in inputs.items()}
                if isinstance(given["input"], DTensor):
                    given["weight"] = distribute_tensor(inputs["weight"], mesh, [WHOLE])
                leaves = [t.requires_grad_() for t in given.values()]
                output = call(used, given)
                grads = torch.autograd.grad(output.square().sum(), leaves, allow_unused=True)
                found.append(dict(zip(inputs, grads, strict=True)))
            for name, right in found[0].items():
                assert_close(found[1][name].full_tensor(), right)


@pytest.mark.parametrize("compiled", [False, True])
def test_one_output(compiled, ranks_2):
    ranks_2.run(check_one_output, compiled)


def check_disabled(device):
    """The formula, on DTensors whose communication is PyTorch's."""
    mesh = mesh_of(device, (2,))
    inputs = arguments(fused_gated_add_rms_norm, SHAPE, (5, 8), device=device)
    placed = {
        n: distribute_tensor(t, mesh, [BATCH if t.dim() > 1 else WHOLE]) for n, t in inputs.items()
    }
    found = []
    for given in (inputs, placed):
        leaves = [t.requires_grad_() for t in given.values()]
        with fused_op.disabled():
            outputs = fused_gated_add_rms_norm(**given)
        found.append([*tuple_of(outputs), *torch.autograd.grad(loss(outputs), leaves)])
    for right, mine in zip(*found, strict=True):
        assert_close(mine.full_tensor(), right)


def test_disabled(ranks_2):
    ranks_2.run(check_disabled)


def check_refusals(device):
    """A shard of three entries would fit a rank's two rows of four."""
    mesh = mesh_of(device, (2,))
    for function in FUNCTIONS:
        inputs = arguments(function, (4, 2, 8), (4, 8), device=device)
        wrong = inputs | {"scale": draw(3, 8, device=device)}
        placed = {
            n: distribute_tensor(t, mesh, [BATCH if t.dim() > 1 else WHOLE])
            for n, t in wrong.items()
        }
        with pytest.raises(RuntimeError, match="the shape of scale must be the first dimensions"):
            function(**placed)
        placed["scale"] = inputs["scale"]
        with pytest.raises(RuntimeError, match=r"got mixed torch\.Tensor and DTensor: scale is"):
            function(**placed)


def test_refusals(ranks_2):
    ranks_2.run(check_refusals)
