"""``override_torch``: PyTorch's norms run our kernels, with PyTorch's results and derivatives."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fused_op
from tests.case import SEED
from tests.contexts.override import BOUNDS, NORMS, RMS_IS_AN_OP, arguments, results

pytestmark = [
    pytest.mark.filterwarnings("error:fused_op"),
    pytest.mark.usefixtures("override_ends"),
]


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_values_counts_and_undo(name: str, device: str, dtype: torch.dtype) -> None:
    """Catches a call that is not ours, wrong values, and bits that do not come back."""
    tensors = arguments(name, device, dtype)
    before = results(name, tensors)
    with fused_op.override_torch() as override:
        inside = results(name, tensors)
    # Gradients of parameters are sums over 35 rows, of terms that follow the rounded output.
    for actual, expected, factor in zip(inside, before, [1, 1, 6, 6][: len(inside)], strict=True):
        bound = factor * BOUNDS[dtype]
        torch.testing.assert_close(actual, expected, rtol=bound, atol=bound)
    op = "native_layer_norm" if name == "layer_norm" else "_fused_rms_norm"
    report = override.report()
    assert report.ours == {op: 1, f"{op}_backward": 1} and not report.torchs
    after = results(name, tensors)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert override.report() == report  # ended with the block


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("has_weight", [True, False])
def test_all_outputs_are_like_those_of_pytorch(name, has_weight, device, dtype) -> None:
    """Catches statistics of another shape or dtype than fake tensors promise."""
    x = torch.randn(3, 2, 4, 5, device=device, dtype=dtype).transpose(0, 1)
    weight = torch.randn(4, 5, device=device, dtype=dtype) if has_weight else None
    is_layer_norm = name == "layer_norm"
    op = torch.ops.aten.native_layer_norm if is_layer_norm else torch.ops.aten._fused_rms_norm
    backward = getattr(torch.ops.aten, op._qualified_op_name.split("::")[1] + "_backward")
    extra = [None] if is_layer_norm else []
    runs = []
    for is_ours in (False, True):
        if not is_ours and not is_layer_norm and device == "cpu":
            runs.append([*(op(x, [4, 5], weight, 1e-5))])  # it has no backward of its own
            continue
        override = fused_op.override_torch() if is_ours else None
        outputs = op(x, [4, 5], weight, *extra, 1e-5)
        mask = [True, has_weight, False][: 2 + is_layer_norm]
        grads = backward(x, x, [4, 5], *outputs[1:], weight, *extra, mask)
        if override:
            override.undo()
            assert sum(override.report().ours.values()) == 2
        runs.append([*outputs, *grads])
    for theirs, ours in zip(*runs, strict=len(runs[0]) == len(runs[1])):
        assert (theirs is None) == (ours is None)
        if theirs is not None:
            assert (theirs.shape, theirs.dtype) == (ours.shape, ours.dtype)
            assert theirs.is_contiguous() == ours.is_contiguous()
            torch.testing.assert_close(ours, theirs, rtol=BOUNDS[dtype], atol=BOUNDS[dtype])


@pytest.mark.parametrize("name", NORMS)
def test_derivatives_of_each_kind(name: str, device: str) -> None:
    """Catches autograd, forward-mode AD or a transform that PyTorch's ops lose under the switch."""
    tensors = arguments(name, device, torch.float64, cols=3)

    def function(input: Tensor, *parameters: Tensor) -> Tensor:
        return getattr(F, name)(input, [3], *parameters)

    with fused_op.override_torch() as override:
        assert torch.autograd.gradcheck(
            function, tensors, check_batched_grad=True, check_forward_ad=True
        )
        assert torch.autograd.gradgradcheck(function, tensors, check_fwd_over_rev=True)
        detached = [t.detach() for t in tensors]
        batched = torch.func.vmap(lambda x: function(x, *detached[1:]))(detached[0])
        jacobians = torch.func.jacrev(function)(*detached), torch.func.jacfwd(function)(*detached)
    assert all(count > 0 for count in override.report().ours.values())
    torch.testing.assert_close(batched, function(*detached))
    torch.testing.assert_close(*jacobians)


@pytest.mark.parametrize("name", NORMS)
def test_samples_of_pytorch(name: str, device: str) -> None:
    """Catches a shape, an absent argument or an error that PyTorch's own tests think of."""
    pytest.importorskip("expecttest", reason="torch.testing._internal needs it")
    from torch.testing._internal.common_methods_invocations import op_db

    info = next(op for op in op_db if op.name == f"nn.functional.{name}")
    seen = 0
    for dtype, bound in BOUNDS.items():
        for sample in info.sample_inputs(device, dtype, requires_grad=True):
            leaves = [t for t in (sample.input, *sample.args) if isinstance(t, Tensor)]
            leaves = [t for t in leaves if t.numel()]
            runs = []
            for is_on in (False, True):
                override = fused_op.override_torch() if is_on else None
                output = info.op(sample.input, *sample.args, **sample.kwargs)
                loss = output.float().cos().sum()
                runs.append((output, *(torch.autograd.grad(loss, leaves) if leaves else ())))
                if override:
                    override.undo()
                    seen += sum(override.report().ours.values())
            # Rows of few elements leave what is left of larger terms: see test_opinfo.py.
            torch.testing.assert_close(*runs, rtol=5 * bound, atol=5 * bound)
    assert seen > 0
    with fused_op.override_torch():
        for error in info.error_inputs(device) if info.error_inputs_func else ():
            sample = error.sample_input
            with pytest.raises(error.error_type, match=error.error_regex):
                info.op(sample.input, *sample.args, **sample.kwargs)


@pytest.mark.skipif(not RMS_IS_AN_OP, reason="this torch has no op for the RMS norm")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_rms_norm_without_the_kernels(dtype: torch.dtype) -> None:
    """Catches a wrong formula where PyTorch has no kernel, on the CPU."""
    tensors = arguments("rms_norm", "cpu", dtype)
    before = results("rms_norm", tensors)
    with fused_op.override_torch(), fused_op.disabled():
        inside = results("rms_norm", tensors)
    torch.testing.assert_close(inside, before, rtol=BOUNDS[dtype], atol=BOUNDS[dtype])
    assert torch.equal(inside[0], before[0])


@pytest.mark.skipif(not RMS_IS_AN_OP, reason="this torch has no op for the RMS norm")
def test_dtypes_that_pytorch_refuses(device: str) -> None:
    """Catches the formula computing integers, rounded to integers."""
    with (
        fused_op.override_torch(),
        pytest.raises(NotImplementedError, match="not implemented for 'Long'"),
    ):
        F.rms_norm(torch.arange(8, device=device).view(1, 8), (8,))


@pytest.mark.parametrize("name", NORMS)
def test_no_rows_and_other_tensors(name: str, device: str) -> None:
    """Catches a crash on an empty batch, and meta tensors that lose PyTorch's own rules."""
    weight = torch.ones(8, device=device, requires_grad=True)
    with fused_op.override_torch():
        getattr(F, name)(torch.empty(0, 8, device=device), (8,), weight).sum().backward()
        meta = getattr(F, name)(torch.empty(3, 8, device="meta"), (8,))
    assert torch.equal(weight.grad, torch.zeros(8, device=device))
    assert meta.shape == (3, 8) and meta.is_meta


def test_f32_parameters_beside_16_bit_rows() -> None:
    """Catches statistics that are rounded to 16 bits, which PyTorch keeps in f32 here."""
    x = torch.randn(4, 8, dtype=torch.bfloat16)
    weight = torch.randn(8)
    with fused_op.override_torch() as override:
        output, mean, _ = torch.native_layer_norm(x, [8], weight, None, 1e-5)
    theirs, their_mean, _ = torch.native_layer_norm(x, [8], weight, None, 1e-5)
    assert (output.dtype, mean.dtype) == (theirs.dtype, their_mean.dtype)
    torch.testing.assert_close(mean, their_mean)
    assert override.report().ours == {"native_layer_norm": 1}


def test_saved_statistics_may_move(device: str) -> None:
    """Catches a backward that takes two tensors for neighbours in memory because they once were."""
    tensors = arguments("layer_norm", device)
    with fused_op.override_torch():
        plain = results("layer_norm", tensors)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone()):
            moved = results("layer_norm", tensors)
    assert all(torch.equal(a, b) for a, b in zip(plain, moved, strict=True))


@pytest.mark.parametrize("name", NORMS)
def test_random_layouts(name: str, device: str) -> None:
    """Catches a layout of rows or gradients that PyTorch's kernel takes otherwise."""
    rng = random.Random(SEED)
    torch.manual_seed(SEED)
    for _ in range(60):
        dtype = rng.choice(list(BOUNDS))
        shape = [rng.choice([0, 1, 3, 5, 17]) for _ in range(rng.randint(0, 3))] + [8, 3]
        ndim = rng.randint(1, 2)
        order = list(range(len(shape)))
        rng.shuffle(order)
        inverse = [order.index(i) for i in range(len(order))]
        x = torch.randn([shape[i] for i in order], device=device).to(dtype).permute(inverse)
        x = (x[:1].expand_as(x) if rng.random() < 0.3 else x).requires_grad_()
        weight = torch.randn(shape[-ndim:], device=device).to(dtype).requires_grad_()
        grad = torch.randn(shape, device=device).to(dtype).transpose(0, -1).contiguous()
        runs = []
        for is_on in (False, True):
            override = fused_op.override_torch() if is_on else None
            output = getattr(F, name)(x, shape[-ndim:], weight)
            found = torch.autograd.grad(output, [x, weight], grad.transpose(0, -1))
            runs.append((output, *found))
            if override:
                override.undo()
        bound = 10 * BOUNDS[dtype]
        for expected, found in zip(*runs, strict=True):
            # A weight's gradient is a sum over rows, whose rounded statistics leave no small one.
            largest = max([1.0, *expected.abs().flatten().tolist()])
            torch.testing.assert_close(found, expected, rtol=bound, atol=bound * largest)
