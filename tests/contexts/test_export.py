"""Code that is compiled once and runs for any number of rows, here or without Python.

Catches a shape that is burnt into a graph, a recompilation per batch, and an op that inductor's
code, a saved program or an AOTInductor package cannot call. test_compile.py looks into the
graphs.
"""

import faulthandler
import io

import pytest
import torch
import torch._dynamo.compiled_autograd
import torch._inductor.config
from torch import nn

import fused_op
from tests.calls import arguments, assert_same, loss, outputs
from tests.ops import OPS


@pytest.fixture(autouse=True)
def compiled_afresh():
    """Graphs on disk are found by what they compute: they would outlive what is foretold of it."""
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        yield


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_no_recompilation_per_number_of_rows(op, device, backend):
    """Catches a guard on the size of the batch; zero and one are apart, unless marked, as in all
    that PyTorch compiles."""
    compiled = torch.compile(op.fused, fullgraph=True, dynamic=True, backend=backend)
    params = [t for t in arguments(op, requires_grad=True, device=device) if t.dim() == 1]

    def check(rows):
        x = torch.randn(1 + op.adds, rows, 4, 6, device=device).unbind()
        args = [*(t.requires_grad_() for t in x), *params]
        result, expected = compiled(*args), op.fused(*args)
        assert_same(result, expected, rtol=0, atol=0)
        wanted = torch.autograd.grad(loss(expected), args)
        assert_same(torch.autograd.grad(loss(result), args), wanted)

    check(3)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (2, 7, 300):
            check(rows)


def test_rows_that_only_the_data_tells(op, device):
    """Catches a question about a size that has no answer while compiling: x[mask] has any number
    of rows, zero and one among them."""

    @torch.compile(fullgraph=True, backend="aot_eager")
    def selected(mask, *args):
        rows = [t[mask] if t.dim() > 1 else t for t in args]
        return op.fused(*rows)

    args = arguments(op, device=device)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for mask in ([1, 1, 0], [0, 1, 0], [0, 0, 0], [1, 1, 1]):
            mask = torch.tensor(mask, dtype=torch.bool, device=device)
            expected = op.fused(*(t[mask] if t.dim() > 1 else t for t in args))
            assert_same(selected(mask, *args), expected, rtol=0, atol=0)


@pytest.mark.slow
def test_inductor_fuses_around_it(device):
    """Catches strides or dtypes that were foretold wrongly: inductor's code relies on them, on
    both sides of the call, in both directions. All ops in one graph: g++ needs seconds for each."""

    def block(*args):  # of what inductor's code computes to the bit
        turned = [t.mT.contiguous().mT.abs() if t.dim() > 1 else t * 0.5 for t in args]
        results = []
        for op in OPS:
            results += outputs(op.fused(*(turned.pop(0) for _ in op.inputs)))
        return tuple(output.mT.relu() for output in results)

    args = [t for op in OPS for t in arguments(op, requires_grad=True, device=device)]
    result, expected = torch.compile(block, fullgraph=True)(*args), block(*args)
    assert_same(result, expected)
    wanted = torch.autograd.grad(loss(expected), args)
    assert_same(torch.autograd.grad(loss(result), args), wanted)


class Model(nn.Module):
    """Every op, and absent arguments: results that nobody asked for must be tensors there."""

    def __init__(self):
        super().__init__()
        self.first, self.second = fused_op.FusedLayerNorm(16), fused_op.FusedRMSNorm(16)
        self.third = fused_op.FusedAddLayerNorm(16, elementwise_affine=False)
        self.last = fused_op.FusedAddRMSNorm(16, zero_centered=True)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_()

    def forward(self, x):
        branch, residual = self.third(self.second(self.first(x).relu()), x)
        return self.last(branch, residual)


def test_symbolic_trace(device):
    """Catches a forward that branches on what torch.fx has only a name for."""
    model, x = Model().to(device), torch.randn(4, 3, 16, device=device)
    assert_same(torch.fx.symbolic_trace(model)(x), model(x), rtol=0, atol=0)


def test_compiled_autograd(op, device):
    """Catches a backward that cannot be traced by itself, apart from its forward."""
    args = arguments(op, requires_grad=True, device=device)
    expected = torch.autograd.grad(loss(op.fused(*args)), args)
    total = loss(op.fused(*args))
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        total.backward()
    assert_same(tuple(t.grad for t in args), expected)


def exported(device):
    rows = torch.export.Dim("rows")
    x = torch.randn(4, 3, 16, device=device)
    with torch.no_grad():
        return torch.export.export(Model().to(device), (x,), dynamic_shapes=({0: rows},))


def test_exported_program_is_saved_and_loaded(device):
    """Catches an argument that a saved program cannot hold, and a fixed number of rows."""
    program = exported(device)
    names = [str(node.target) for node in program.graph.nodes]
    assert names.count("fused_op.norm_forward.default") == 4
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    loaded = torch.export.load(buffer)
    x = torch.randn(9, 3, 16, device=device)
    with torch.no_grad():
        assert_same(loaded.module()(x), program.module()(x), rtol=0, atol=0)


def test_training_of_an_exported_program_is_refused(device):
    """Catches gradients of zero: the graph has the op, but not the autograd.Function around it."""
    x = torch.randn(4, 3, 16, device=device, requires_grad=True)
    output, residual = exported(device).module()(x)
    with pytest.raises(RuntimeError, match="derivative for fused_op::norm_forward is not impl"):
        (output + residual).sum().backward()


def test_aot_inductor_package(device, tmp_path):
    """Catches an op that runs from Python alone: the package calls it from C++. In a process of its
    own, since what it does wrong there ends the process."""
    path = str(tmp_path / "model.pt2")
    status = exit_status(check_package, device, path)
    # For a CPU without a GPU beside it, which docs/contexts.md promises, that is no excuse.
    if status != 0 and torch.cuda.is_available():
        if exit_status(check_package_without_our_ops, device, path) != 0:
            pytest.skip("PyTorch cannot load a package of its own ops here either")
    assert status == 0


def exit_status(function, *args) -> int | None:
    child = torch.multiprocessing.get_context("spawn").Process(target=function, args=args)
    child.start()
    child.join()
    return child.exitcode


def check_package_without_our_ops(device: str, path: str) -> None:
    x = torch.randn(9, 16, device=device)
    with torch.no_grad():
        packaged(torch.export.export(nn.LayerNorm(16, device=device), (x,)), path)(x)


def packaged(program: torch.export.ExportedProgram, path: str):
    options = {"force_disable_caches": True}
    # Precompiled, the headers take longer than the two files that include them.
    if hasattr(torch._inductor.config.aot_inductor, "precompile_headers"):
        options["aot_inductor.precompile_headers"] = False
    with torch._inductor.config.patch(options):
        torch._inductor.aoti_compile_and_package(program, package_path=path)
    return torch._inductor.aoti_load_package(path)


def check_package(device: str, path: str) -> None:
    faulthandler.enable()
    program = exported(device)
    compiled = packaged(program, path)
    for rows in (9, 2):
        x = torch.randn(rows, 3, 16, device=device)
        with torch.no_grad():
            assert_same(tuple(compiled(x)), program.module()(x), rtol=1e-6, atol=1e-6)
