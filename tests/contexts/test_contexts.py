"""Inference mode, threads, workers of a DataLoader, tensor subclasses, modules as functions.

Each is a place that PyTorch's operators work in, and that a way past the dispatcher could forget.
docs/contexts.md lists all of them, with the tests that show them.
"""

import threading

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.data import DataLoader, Dataset

import fused_op
from tests.calls import arguments, assert_same, loss, outputs

MODULES = ["FusedLayerNorm", "FusedRMSNorm", "FusedAddLayerNorm", "FusedAddRMSNorm"]


def test_inference_mode(op, device):
    """Catches results that are ordinary tensors there: they would carry version counters, and
    a later use in a graph, which PyTorch refuses, would pass."""
    args = arguments(op, requires_grad=True, device=device)
    with torch.inference_mode():
        result = op.fused(*args)
    assert all(output.is_inference() and not output.requires_grad for output in outputs(result))
    assert_same(result, op.fused(*args), rtol=0, atol=0)


def test_results_of_inference_mode_are_refused_in_a_graph(op, device):
    """Catches a gradient through a tensor that nobody tracks: PyTorch's error is the answer."""
    args = arguments(op, device=device)
    with torch.inference_mode():
        rows = outputs(op.fused(*args))[0]
    weight = torch.ones(6, device=device, requires_grad=True)
    for norm in (fused_op.layer_norm, torch.nn.functional.layer_norm):
        with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
            norm(rows, (6,), weight)
    with torch.no_grad():
        fused_op.layer_norm(rows, (6,), weight)
    fused_op.layer_norm(rows.clone(), (6,), weight).sum().backward()
    assert weight.grad is not None


def test_inference_tensors_change_in_place(device):
    """Catches a call that asks an inference tensor for its version counter, which it has not."""
    with torch.inference_mode():
        x = torch.randn(4, 6, device=device)
        output, sum = fused_op.fused_add_layer_norm(x, x)
        output.add_(sum)
        assert_same(fused_op.fused_layer_norm(2 * x), output - sum)


@pytest.mark.parametrize("shape", [(4, 6), (300, 300)], ids=["short", "long"])
def test_threads_train_at_the_same_time(op, device, shape):
    """Catches state that calls share, and interpreter locks that are taken in the wrong order:
    each thread has tensors of its own, and gets the bits of a run alone. Long calls let go of
    the interpreter."""
    problems = []
    for seed in range(4):
        torch.manual_seed(seed)
        shapes = [shape if name in ("input", "residual") else shape[-1:] for name in op.inputs]
        args = [torch.randn(s, device=device, requires_grad=True) for s in shapes]
        result = op.fused(*args)
        problems.append((args, (*outputs(result), *torch.autograd.grad(loss(result), args))))
    start, wrong = threading.Barrier(len(problems)), []

    def work(args, expected):
        start.wait()
        for _ in range(20):
            result = op.fused(*args)
            actual = (*outputs(result), *torch.autograd.grad(loss(result), args))
            if not all(map(torch.equal, actual, expected)):
                wrong.append(actual)
                return

    workers = [threading.Thread(target=work, args=problem) for problem in problems]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert not any(worker.is_alive() for worker in workers), "deadlock"
    assert not wrong


def test_threads_of_one_graph(op, device):
    """Catches a backward that uses up what another thread's backward of the same graph reads."""
    args = arguments(op, requires_grad=True, device=device)
    total = loss(op.fused(*args))
    expected = torch.autograd.grad(total, args, retain_graph=True)
    results = []

    def work():
        results.append(torch.autograd.grad(total, args, retain_graph=True))

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert len(results) == 4
    for actual in results:
        assert_same(actual, expected, rtol=0, atol=0)


class NormalizedRows(Dataset):
    """Rows that its workers normalise; gradients too, for what they are worth in a worker."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.rows = torch.randn(8, 3, 40_000, generator=generator)
        self.norm = fused_op.FusedLayerNorm(40_000)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index].clone().requires_grad_()
        output = self.norm(row)
        (grad,) = torch.autograd.grad(output.square().sum(), row)
        return output.detach(), grad


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_data_loader_workers(start_method):
    """Catches a worker that waits for threads which only its parent has, or that cannot load the
    library: forked children inherit it in use, spawned ones import it."""
    if start_method == "fork" and torch.cuda.is_initialized():
        pytest.skip("autograd of PyTorch cannot run in a child forked after CUDA was used")
    data = NormalizedRows()
    expected = [torch.stack(t) for t in zip(*(data[i] for i in range(8)), strict=True)]
    loader = DataLoader(
        data, batch_size=4, num_workers=2, multiprocessing_context=start_method, timeout=120
    )
    actual = [torch.cat(t) for t in zip(*loader, strict=True)]
    assert_same(tuple(actual), tuple(expected), rtol=0, atol=0)


class Logged(torch.Tensor):
    """Wraps a tensor it does not show: its own memory is none. Keeps the operators' names."""

    names: list = []  # noqa: RUF012  # of the class on purpose

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.names.append(func.name())
        unwrap = torch.utils._pytree.tree_map_only(cls, lambda t: t.inner, (args, kwargs or {}))
        result = func(*unwrap[0], **unwrap[1])
        return torch.utils._pytree.tree_map_only(torch.Tensor, cls, result)

    __torch_function__ = torch._C._disabled_torch_function_impl


def test_wrapper_subclass_sees_both_ops(op, device):
    """Catches a kernel that reads the memory of a wrapper, which has none, in either direction."""
    args = arguments(op, requires_grad=True, device=device)
    expected = torch.autograd.grad(loss(op.fused(*args)), args)
    wrapped = [Logged(t.detach()).requires_grad_() for t in args]
    Logged.names.clear()
    grads = torch.autograd.grad(loss(op.fused(*wrapped)), wrapped)
    assert Logged.names.count("fused_op::norm_forward") == 1
    assert Logged.names.count("fused_op::norm_backward") == 1
    assert_same(tuple(g.inner for g in grads), expected, rtol=0, atol=0)


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
def test_nested_tensors_are_refused_and_their_values_taken(layout):
    """Catches a kernel that reads a nested tensor's memory by a shape that it has not."""
    nested = torch.nested.nested_tensor([torch.randn(3, 6), torch.randn(5, 6)], layout=layout)
    with pytest.raises(RuntimeError, match=r"must be a dense \(strided\) tensor, got a nested one"):
        fused_op.fused_layer_norm(nested)
    if layout is torch.jagged:
        values = fused_op.fused_layer_norm(nested.values())
        again = torch.nested.nested_tensor_from_jagged(values, nested.offsets())
        expected = torch.nn.functional.layer_norm(nested, (6,))
        assert_same(tuple(again.unbind()), tuple(expected.unbind()))


@pytest.fixture(params=MODULES)
def module(request, device):
    module = getattr(fused_op, request.param)(6, device=device)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    return module


def rows_of(module, *shape):
    count = 2 if "Add" in type(module).__name__ else 1
    return torch.randn(count, *shape, device=module.weight.device)


def test_modules_as_functions(module):
    """Catches parameters that a module keeps to itself: functional_call, per-sample gradients,
    and an ensemble of models give them from outside."""
    parameters = dict(module.named_parameters())
    rows = rows_of(module, 5, 4, 6)

    def total(parameters, *args):
        return loss(torch.func.functional_call(module, parameters, args))

    in_dims = (None, *[0] * len(rows))
    per_sample = torch.func.vmap(torch.func.grad(total), in_dims=in_dims)(parameters, *rows)
    for i in range(5):
        expected = torch.autograd.grad(loss(module(*rows[:, i])), [*parameters.values()])
        assert_same(tuple(per_sample[name][i] for name in parameters), expected)

    models = [parameters, {name: 2 * p for name, p in parameters.items()}]
    stacked = {name: torch.stack([m[name] for m in models]) for name in parameters}
    ensemble = torch.func.vmap(total, in_dims=(0, *[None] * len(rows)))(stacked, *rows)
    assert_same(ensemble, torch.stack([total(m, *rows) for m in models]))


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def test_parametrized_weight(module):
    """Catches a module that reads its parameter past the attribute, which may be computed."""
    args = rows_of(module, 4, 6)
    with torch.no_grad():
        module.weight.mul_(2)
        expected = module(*args)
        module.weight.div_(2)
    parametrize.register_parametrization(module, "weight", Doubled())
    result = module(*args)
    assert_same(result, expected, rtol=0, atol=0)
    loss(result).backward()
    assert module.parametrizations.weight.original.grad is not None
