"""DTensor: several processes give the numbers of one.

On a machine with two GPUs each test runs there too, with NCCL (those with four ranks: four GPUs):

    python -m pytest -q tests/contexts/test_distributed*.py -k cuda

Catches a shard that is normalised with another shard's statistics, a gradient of a parameter that
is summed twice or not at all, communication that a norm does not need, ranks that communicate in
different orders, and an import of ``torch.distributed.tensor`` that plain calls would pay for.
"""

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

if not torch.distributed.is_available() or sys.platform == "win32":
    pytest.skip("torch has no torch.distributed", allow_module_level=True)

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.functional import layer_norm
from torch.testing import assert_close

import fused_op
from fused_op import FusedLayerNorm
from tests.case import gradients, make_case
from tests.contexts.ranks import mesh_of, ranks_fixture
from tests.ops import BF16, F32, OPS, Pair

ROOT = Path(__file__).parents[2]
SHAPE = (5, 3, 7)  # no dimension is a multiple of two: shards differ in size
BATCH, SEQUENCE, HIDDEN, WHOLE, PARTIAL = Shard(0), Shard(1), Shard(2), Replicate(), Partial()


two_ranks, four_ranks = ranks_fixture(2), ranks_fixture(4)


# --- One op ---------------------------------------------------------------------------------------


def distribute(tensor, mesh, placements):
    """As distribute_tensor, but Partial too: the ranks' summands of the tensor."""
    if PARTIAL not in placements:
        return distribute_tensor(tensor, mesh, placements)
    whole = tuple(WHOLE if p == PARTIAL else p for p in placements)
    local = distribute_tensor(tensor, mesh, whole).to_local()
    for i, p in enumerate(placements):
        if p == PARTIAL:  # all zero but one: their sum is exact
            local = local if mesh.get_local_rank(i) == 0 else torch.zeros_like(local)
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def check_op(device, case, mesh_shape, inputs, residuals, parameters, expected, call=None):
    """Distribute the tensors of the case as said, run it, and compare with the case itself."""
    mesh = mesh_of(device, mesh_shape)
    layouts = dict.fromkeys(case.op.inputs, parameters) | {"input": inputs, "residual": residuals}
    leaves = {
        name: distribute(t.to(device), mesh, layouts[name]).requires_grad_()
        for name, t in case.inputs.items()
    }
    grads = [distribute(g.to(device), mesh, expected) for g in case.grads]
    # Neither torch.compile nor modules take the mode that counts.
    with contextlib.nullcontext() if call else CommDebugMode() as communication:
        outputs = (call or case.op.fused)(*leaves.values(), **case.options)
        outputs = outputs if case.op.adds else (outputs,)
        results = gradients(outputs, list(leaves.values()), grads)
    if inputs == residuals == expected and set(parameters) == {WHOLE} and not call:
        assert communication.get_total_counts() == 0, communication.get_comm_counts()

    results = dict(zip(("output", "sum"), outputs, strict=False)) | {
        f"grad_{name}": grad for name, grad in zip(leaves, results, strict=True)
    }
    sums = tuple(PARTIAL if p.is_shard() else WHOLE for p in expected)
    for name, result in results.items():
        wanted = sums if name in ("grad_weight", "grad_bias") else expected
        assert result.placements == wanted, (name, result.placements)
        contiguous = torch.empty(result.shape, device="meta").stride()
        assert result.stride() == contiguous and result.to_local().is_contiguous()
    whole = {
        name: result.full_tensor().detach().cpu().contiguous() for name, result in results.items()
    }
    case.check(whole)
    if device == "cpu":
        for name, alone in case.run().items():
            if name not in ("grad_weight", "grad_bias"):  # rows do not depend on one another
                assert torch.equal(whole[name], alone), name


LAYOUTS = {  # of input, residual, parameters; and what is expected of the outputs
    "batch": (BATCH, BATCH, WHOLE, BATCH),
    "sequence": (SEQUENCE, SEQUENCE, WHOLE, SEQUENCE),
    "hidden": (HIDDEN, HIDDEN, BATCH, WHOLE),  # and the parameters' only dimension
    "whole": (WHOLE, WHOLE, WHOLE, WHOLE),
    "partial": (PARTIAL, PARTIAL, WHOLE, WHOLE),
    "sequence-parameters": (SEQUENCE, SEQUENCE, BATCH, SEQUENCE),
}
RESIDUAL_LAYOUTS = {
    "different": (BATCH, SEQUENCE, WHOLE, BATCH),
    "whole-sequence": (WHOLE, SEQUENCE, WHOLE, SEQUENCE),
    "partial-sequence": (PARTIAL, SEQUENCE, WHOLE, SEQUENCE),  # after a row-wise parallel linear
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_op_on_shards(op, layout, ranks_2):
    placements = [(p,) for p in LAYOUTS[layout]]
    ranks_2.run(check_op, make_case(op, SHAPE, Pair(F32, F32), "cpu"), (2,), *placements)


@pytest.mark.parametrize("layout", RESIDUAL_LAYOUTS)
def test_residual_is_sharded_otherwise(layout, ranks_2):
    placements = [(p,) for p in RESIDUAL_LAYOUTS[layout]]
    ranks_2.run(check_op, make_case(OPS[2], SHAPE, Pair(BF16, F32), "cpu"), (2,), *placements)


@pytest.mark.parametrize("shape", [(1, 3, 7), (0, 3, 7), (5, 1, 1)], ids=str)
def test_rank_without_rows(shape, ranks_2):
    for op in OPS:
        case = make_case(op, shape, Pair(F32, F32), "cpu")
        for dim in (0, 1):
            shard = (Shard(dim),)
            ranks_2.run(check_op, case, (2,), shard, shard, (WHOLE,), shard)


def test_several_normalized_dimensions(ranks_2):
    case = make_case(OPS[0], SHAPE, Pair(F32, F32), "cpu", normalized_shape=SHAPE[1:])
    for inputs, expected in ((BATCH, BATCH), (SEQUENCE, WHOLE), (HIDDEN, WHOLE)):
        ranks_2.run(check_op, case, (2,), (inputs,), (inputs,), (SEQUENCE,), (expected,))


MESHES = {
    "batch-sequence": ((BATCH, SEQUENCE), (WHOLE, WHOLE), (BATCH, SEQUENCE)),
    "sequence-batch": ((SEQUENCE, BATCH), (WHOLE, WHOLE), (SEQUENCE, BATCH)),
    "batch-hidden": ((BATCH, HIDDEN), (WHOLE, BATCH), (BATCH, WHOLE)),
    "batch-batch": ((BATCH, BATCH), (BATCH, WHOLE), (BATCH, BATCH)),
    "whole-sequence": ((WHOLE, SEQUENCE), (WHOLE, WHOLE), (WHOLE, SEQUENCE)),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", MESHES)
def test_mesh_of_two_dimensions(layout, ranks_4):
    inputs, parameters, expected = MESHES[layout]
    for op in OPS:
        case = make_case(op, SHAPE, Pair(F32, F32), "cpu")
        ranks_4.run(check_op, case, (2, 2), inputs, inputs, parameters, expected)


# --- The other ways to an op ----------------------------------------------------------------------


def through_function(input, weight, bias, eps):
    return fused_op.FusedLayerNormFunction.apply(input, weight, bias, eps)


def through_module(input, weight, bias, eps):
    norm = FusedLayerNorm(weight.shape, eps, device=input.device)
    distribute_module(norm, input.device_mesh)
    return torch.func.functional_call(norm, {"weight": weight, "bias": bias}, input)


def disabled(input, weight, bias, eps):
    return fused_op.disabled()(fused_op.fused_layer_norm)(input, weight, bias, eps)


def compiled(input, weight, bias, eps):
    torch._dynamo.reset()
    function = torch.compile(fused_op.fused_layer_norm, fullgraph=True, backend="aot_eager")
    return function(input, weight, bias, eps)


def compiled_add(input, residual, weight, bias, eps):
    torch._dynamo.reset()
    function = torch.compile(fused_op.fused_add_layer_norm, fullgraph=True, backend="aot_eager")
    return function(input, residual, weight, bias, eps)


@pytest.mark.parametrize("call", [through_function, through_module], ids=lambda f: f.__name__)
def test_other_doors(call, ranks_2):
    case = make_case(OPS[0], SHAPE, Pair(BF16, F32), "cpu")
    for rows in ((BATCH,), (SEQUENCE,)):
        ranks_2.run(check_op, case, (2,), rows, rows, (WHOLE,), rows, call)


@pytest.mark.parametrize("layout", ["sequence-parameters", "hidden"])
def test_compile(layout, ranks_2):
    placements = [(p,) for p in LAYOUTS[layout]]
    for op, call in ((OPS[0], compiled), (OPS[2], compiled_add)):
        case = make_case(op, SHAPE, Pair(F32, F32), "cpu")
        ranks_2.run(check_op, case, (2,), *placements, call)


def check_compiled_output(device, backend, placement, used):
    """As the last norm of a model, whose sum nobody wants."""
    mesh = mesh_of(device, (2,))
    inputs = make_case(OPS[3], SHAPE, Pair(F32, F32), device).inputs.values()

    def output(*tensors):
        return fused_op.fused_add_rms_norm(*tensors)[used]

    torch._dynamo.reset()
    found = []
    for function, place in (
        (output, lambda t: t.clone()),
        (torch.compile(output, fullgraph=True, backend=backend),
         lambda t: distribute_tensor(t, mesh, (placement if t.dim() > 1 else WHOLE,))),
    ):  # fmt: skip
        leaves = [place(t).requires_grad_() for t in inputs]
        grads = torch.autograd.grad(function(*leaves).square().sum(), leaves, allow_unused=True)
        found.append(grads[: 3 - used])  # the sum does not lead to the weight
    for right, grad in zip(*found, strict=True):
        assert_close(grad.full_tensor(), right)


@pytest.mark.parametrize("used", [0, 1])
@pytest.mark.parametrize("placement", [BATCH, HIDDEN], ids=str)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile_of_one_output(backend, placement, used, ranks_2):
    ranks_2.run(check_compiled_output, backend, placement, used)


def check_options(device):
    """Dtypes of their own, and an output that is saved in the place of the input."""
    mesh = mesh_of(device, (2,))
    case = make_case(OPS[3], SHAPE, Pair(BF16, F32), device)
    x, residual, weight = case.inputs.values()
    for function, tensors, options in (
        (fused_op.fused_rms_norm, (x, weight), {"memory_efficient": True, "out_dtype": F32}),
        (fused_op.fused_add_rms_norm, (x, residual.float(), weight), {"residual_dtype": F32}),
    ):
        for rows in (BATCH, HIDDEN):
            results = []
            for place in (lambda t, p: t.clone(), lambda t, p: distribute_tensor(t, mesh, (p,))):
                leaves = [place(t, rows if t is not weight else WHOLE) for t in tensors]
                leaves = [t.requires_grad_() for t in leaves]
                outputs = function(*leaves, **options)
                outputs = outputs if isinstance(outputs, tuple) else (outputs,)
                grads = [place(case.grads[0].to(output.dtype), rows) for output in outputs]
                results.append([*outputs, *gradients(outputs, leaves, grads)])
            for alone, sharded in zip(*results, strict=True):
                assert alone.dtype == sharded.dtype
                bits = {} if alone is results[0][-1] else {"rtol": 0, "atol": 0}
                assert_close(sharded.full_tensor(), alone, **bits)


def test_options(ranks_2):
    ranks_2.run(check_options)


def check_higher_derivatives(device):
    """Also with the kernels disabled, where forward is composite on DTensors too."""
    mesh = mesh_of(device, (2,))
    case = make_case(OPS[0], SHAPE, Pair(F32, F32), device)
    for function in (fused_op.fused_layer_norm, disabled):
        results = []
        for place in (lambda t, p: t.clone(), lambda t, p: distribute_tensor(t, mesh, (p,))):
            leaves = [place(case.inputs["input"], SEQUENCE).requires_grad_()]
            leaves += [place(case.inputs[n], WHOLE).requires_grad_() for n in ("weight", "bias")]
            output = function(*leaves, 1e-5)
            loss = (output * place(case.grads[0], SEQUENCE)).sum()
            (grad,) = torch.autograd.grad(loss, leaves[:1], create_graph=True)
            results.append([output, grad, *torch.autograd.grad(grad.square().sum(), leaves[:2])])
        for alone, sharded in zip(*results, strict=True):
            assert_close(sharded.full_tensor(), alone, rtol=1e-4, atol=1e-4)


def test_higher_derivatives(ranks_2):
    ranks_2.run(check_higher_derivatives)


def check_gradient_that_is_partial(device):
    """It arrives so from a column-wise parallel linear, for instance."""
    mesh = mesh_of(device, (2,))
    case = make_case(OPS[0], SHAPE, Pair(F32, F32), device)
    leaves = [distribute(t, mesh, (WHOLE,)).requires_grad_() for t in case.inputs.values()]
    output = fused_op.fused_layer_norm(*leaves, case.eps)
    grads = torch.autograd.grad(output, leaves, distribute(case.grads[0], mesh, (PARTIAL,)))
    for name, grad in zip(case.inputs, grads, strict=True):
        assert torch.equal(grad.full_tensor(), case.run()[f"grad_{name}"])


def test_gradient_that_is_partial(ranks_2):
    ranks_2.run(check_gradient_that_is_partial)


# --- What is refused ------------------------------------------------------------------------------


def message(function, *args):
    with pytest.raises(RuntimeError) as info:
        function(*args)
    return str(info.value)


def check_plain_tensors_among_dtensors(device):
    mesh = mesh_of(device, (2,))
    inputs = make_case(OPS[0], SHAPE, Pair(F32, F32), device).inputs
    x, weight = inputs["input"], inputs["weight"]
    sharded = distribute_tensor(x, mesh, (SEQUENCE,))
    mixed = "got mixed torch.Tensor and DTensor"
    for args in ((sharded, weight), (x, distribute_tensor(weight, mesh, (WHOLE,)))):
        assert mixed in message(layer_norm, args[0], x.shape[-1:], args[1])
        assert mixed in message(fused_op.fused_layer_norm, *args)
    # A plain gradient may only be that of all rows.
    leaf, whole = sharded.detach().requires_grad_(), distribute_tensor(weight, mesh, (WHOLE,))
    output, plain = fused_op.fused_layer_norm(leaf, whole), torch.randn_like(x)
    grads = [
        torch.autograd.grad(output, leaf, g, retain_graph=True)[0]
        for g in (plain, distribute_tensor(plain, mesh, (SEQUENCE,)))
    ]
    assert torch.equal(grads[0].full_tensor(), grads[1].full_tensor())

    with implicit_replication():
        output = fused_op.fused_layer_norm(sharded, weight)
    assert output.placements == (SEQUENCE,)
    assert torch.equal(output.full_tensor(), fused_op.fused_layer_norm(x, weight))

    other = distribute_tensor(weight, mesh_of(device, (1, 2)), (WHOLE, WHOLE))
    assert "weight must be on the device mesh of the other tensors" in message(
        fused_op.fused_layer_norm, sharded, other
    )


def test_plain_tensors_among_dtensors(ranks_2):
    ranks_2.run(check_plain_tensors_among_dtensors)


def check_dropout_is_refused(device):
    mesh = mesh_of(device, (2,))
    x = distribute_tensor(torch.ones(SHAPE, device=device), mesh, (SEQUENCE,))
    with pytest.raises(NotImplementedError, match="dropout_p must be 0 for a DTensor"):
        fused_op.fused_rms_norm(x, dropout_p=0.5)
    fused_op.fused_rms_norm(x, dropout_p=0.5, training=False)


def test_dropout_is_refused(ranks_2):
    ranks_2.run(check_dropout_is_refused)


def check_rank_outside_of_the_mesh(device):
    mesh = DeviceMesh(device, [1])
    case = make_case(OPS[2], SHAPE, Pair(F32, F32), device)
    leaves = [distribute_tensor(t, mesh, (WHOLE,)).requires_grad_() for t in case.inputs.values()]
    outputs = fused_op.fused_add_layer_norm(*leaves)
    grads = [distribute_tensor(grad, mesh, (WHOLE,)) for grad in case.grads]
    for result, like in zip(gradients(outputs, leaves, grads), leaves, strict=True):
        assert result.shape == like.shape
        assert result.to_local().numel() == (like.numel() if mesh.get_coordinate() else 0)


def test_rank_outside_of_the_mesh(ranks_2):
    ranks_2.run(check_rank_outside_of_the_mesh)


# --- In a process of its own ----------------------------------------------------------------------


def test_import_leaves_dtensor_alone():
    """It takes half a second, and plain calls have no use for it."""
    code = (
        "import sys, torch\n"
        "if 'torch.distributed.tensor' not in sys.modules:\n"
        "    import fused_op\n"
        "    fused_op.fused_layer_norm(torch.ones(2, 3, requires_grad=True)).sum().backward()\n"
        "    fused_op.fused_layer_norm(torch.ones(2, 3, device='meta'))\n"
        "    assert 'torch.distributed.tensor' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


FIRST_CALL = """
import os, sys, torch, fused_op
from torch.distributed.tensor import DTensor, Replicate, init_device_mesh
torch.distributed.init_process_group(
    "gloo", store=torch.distributed.FileStore(sys.argv[1], 1), rank=0, world_size=1)
x = DTensor.from_local(torch.ones(2, 3), init_device_mesh("cpu", (1,)), (Replicate(),))
assert isinstance({call}, DTensor)
os._exit(0)  # as in ranks.py
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "call",
    [
        "fused_op.FusedLayerNormFunction.apply(x)",
        "torch.compile(fused_op.fused_rms_norm, fullgraph=True, backend='eager')(x)",
    ],
)
def test_first_call_has_the_rules(call, tmp_path):
    """They are not there before the first DTensor, whichever way it comes."""
    command = [sys.executable, "-c", FIRST_CALL.format(call=call), str(tmp_path / "store")]
    subprocess.run(command, cwd=ROOT, check=True)
