"""``compile_pass``: dropout and the residual addition behind it move into the norm.

The masks are others than without the pass. What a call dropped is read off its sum, and everything
else is compared with formulas for that mask.
"""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import fused_op
from fused_op import fused_layer_norm, fused_rms_norm
from fused_op._compiled_dropouts import fuse_dropouts
from tests.case import SEED
from tests.contexts.test_compile_pass import inductor, is_clean

__all__ = ["is_clean"]  # the fixture

ROWS, COLS, P = 64, 24, 0.25


def rewritten(function, *given: Tensor):
    """The results of a function's graph after the pass, and what that did."""
    reports = []

    def rewrite(module: fx.GraphModule, _) -> fx.GraphModule:
        count, left = fuse_dropouts(module.graph)
        module.graph.lint()
        reports.append((count, dict(left)))
        module.recompile()
        return module

    torch.compiler.reset()
    results = torch.compile(function, backend=rewrite, fullgraph=True)(*given)
    (report,) = reports
    return results, report


def inputs(dtype=torch.float64, device="cpu", wide=None):
    """A branch without zeros, a residual, weight and bias."""
    torch.manual_seed(SEED)
    branch = torch.rand(4, ROWS, COLS, device=device).to(dtype) + 0.5
    residual = torch.randn(4, ROWS, COLS, device=device).to(wide or dtype)
    parameters = [torch.randn(COLS, device=device).to(wide or dtype) for _ in range(2)]
    return [t.requires_grad_() for t in (branch, residual, *parameters)]


def layer_norm(branch, residual, weight, bias):
    hidden = residual + F.dropout(branch, P)
    return fused_layer_norm(hidden, weight, bias, 1e-3), hidden


def rms_norm(branch, residual, weight, bias):
    hidden = torch.add(F.dropout(input=branch, p=P), residual)
    output = fused_rms_norm(hidden, weight, 1e-3, zero_centered=True)
    return output + bias, hidden


def two_norms(branch, residual, weight, bias):
    """Of one sum: the first norm adds."""
    hidden = residual + F.dropout(branch, P, True, False)
    first = fused_layer_norm(hidden, weight, bias, 1e-3)
    return first * fused_rms_norm(hidden, None, 1e-3), hidden


def formula(function, branch, residual, weight, bias, is_kept):
    hidden = residual + branch.to(residual.dtype) * is_kept / (1 - P)
    normalised = F.layer_norm(hidden, (COLS,), weight, bias, 1e-3)
    if function is rms_norm:
        normalised = F.rms_norm(hidden, (COLS,), 1 + weight, 1e-3) + bias
    if function is two_norms:
        normalised = normalised * F.rms_norm(hidden, (COLS,), None, 1e-3)
    return normalised, hidden


def gradients(results, leaves):
    return torch.autograd.grad(sum(r.sin().sum() for r in results), leaves, allow_unused=True)


@pytest.mark.parametrize("function", [layer_norm, rms_norm, two_norms])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_values_and_gradients(function, dtype, device) -> None:
    """Catches a sum, a scale or a gradient that is not that of the mask."""
    leaves = inputs(dtype, device)
    found, report = rewritten(function, *leaves)
    assert report == (1, {})
    is_kept = found[1] != leaves[1]
    assert abs(is_kept.double().mean() - (1 - P)) < 0.03  # of 6144 elements: 5 deviations
    expected = formula(function, *leaves, is_kept)
    bound = {"rtol": 1e-9, "atol": 1e-9} if dtype is torch.float64 else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(found, expected, **bound)
    torch.testing.assert_close(gradients(found, leaves), gradients(expected, leaves), **bound)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_beside_a_wide_residual(dtype, device) -> None:
    """As under autocast. Catches a sum or an output that loses bits, and other dtypes."""
    leaves = inputs(dtype, device, torch.float32)
    found, report = rewritten(layer_norm, *leaves)
    assert report == (1, {}) and {t.dtype for t in found} == {torch.float32}
    expected = formula(layer_norm, *leaves, found[1] != leaves[1])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    mine, theirs = gradients(found, leaves), gradients(expected, leaves)
    assert [t.dtype for t in mine] == [t.dtype for t in theirs]
    torch.testing.assert_close(mine[0], theirs[0], rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(mine[1:], theirs[1:], rtol=1e-4, atol=1e-4)


def test_masks_are_drawn_anew(device) -> None:
    """Catches calls of a graph, or runs of it, that share a mask, and one that ignores the seed."""

    def function(branch: Tensor, residual: Tensor) -> Tensor:
        hidden = [residual + F.dropout(branch, P) for _ in range(2)]
        return torch.stack([fused_layer_norm(h, None, None) + h for h in hidden])

    with fused_op.compile_pass() as handle, torch.no_grad():
        compiled = torch.compile(function, fullgraph=True)
        branch, residual, *_ = inputs(torch.float32, device)
        runs = []
        for seed in (1, 1, None):
            if seed is not None:
                torch.manual_seed(seed)
            runs.append(compiled(branch, residual).clone())
    assert handle.report().forward == 2
    assert torch.equal(runs[0], runs[1])
    different = [*runs[0], *runs[2]]
    for i, one in enumerate(different):
        for other in different[:i]:
            assert (one != other).double().mean() > 0.2


class Block(nn.Module):
    """Norms and dropout as modules, one of them after the addition, as in BERT."""

    def __init__(self, size: int, p: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(size) for _ in range(3))
        self.linears = nn.ModuleList(nn.Linear(size, size) for _ in range(3))
        self.dropout = nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norms[0](x + self.dropout(self.linears[0](x)))
        x = x + self.dropout(self.linears[1](self.norms[1](x)))
        return self.norms[2](self.dropout(self.linears[2](x)) + x)


@pytest.mark.parametrize("training", [True, False])
def test_modules(training: bool, device: str) -> None:
    """Catches modules that are not recognised, and dropout outside of training."""
    torch.manual_seed(SEED)
    model = Block(16, 1e-7).train(training).to(device)  # so rare that losses can be compared
    x = torch.randn(8, 16, device=device, requires_grad=True)
    expected = model(x)
    fused_op.convert(model)
    with fused_op.compile_pass() as handle, inductor(generates_code=False):
        found = torch.compile(model, fullgraph=True)(x)
    assert handle.report().forward == 2, handle.report()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    leaves = [x, *model.parameters()]
    mine, theirs = (torch.autograd.grad(y.sin().sum(), leaves) for y in (found, expected))
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["GPT2", "Bert"])
def test_models_of_transformers(name: str, device: str) -> None:
    """Catches a graph of a real model that looks otherwise, and losses that part."""
    transformers = pytest.importorskip("transformers")
    sizes = {
        "GPT2": {"n_embd": 16, "n_head": 2, "n_layer": 2, "resid_pdrop": 1e-7},
        "Bert": {
            "hidden_size": 16,
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "intermediate_size": 32,
            "hidden_dropout_prob": 1e-7,
        },
    }[name]
    rare = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "attention_probs_dropout_prob": 0.0}
    config = getattr(transformers, f"{name}Config")(vocab_size=32, **sizes, **rare)
    task = {"GPT2": "GPT2LMHeadModel", "Bert": "BertForMaskedLM"}[name]
    torch.manual_seed(0)
    model = getattr(transformers, task)(config).to(device).train()
    ids = torch.arange(64, device=device).view(4, 16) % 32
    losses = [model(input_ids=ids, labels=ids).loss.item()]
    fused_op.convert(model)
    with fused_op.compile_pass() as handle, inductor(generates_code=False):
        loss = torch.compile(model)(input_ids=ids, labels=ids).loss
        loss.backward()
    losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    # GPT-2: two a layer, the last of them before the norm at the end. BERT: two a layer.
    assert handle.report().forward == 4, handle.report()


def unused_output(branch, residual, weight, bias):
    hidden = residual + F.dropout(branch, P)
    fused_layer_norm(hidden, weight, bias)
    return hidden


def test_an_output_that_nobody_uses() -> None:
    """Catches an error, and a sum that is lost. Dynamo of some versions leaves the output out."""
    leaves = inputs(torch.float32)
    hidden, (count, left) = rewritten(unused_output, *leaves)
    assert count + left.get("dropout: not the output alone of the norm is used", 0) == 1
    expected = formula(layer_norm, *leaves, hidden != leaves[1])[1]
    torch.testing.assert_close(hidden, expected)


def test_a_sum_between_addition_and_norm(device) -> None:
    """Catches a fused op behind the first user of its sum, and a second norm left out."""

    def function(branch, residual, weight, bias):
        hidden = residual + F.dropout(branch, P)
        double = hidden * 2
        output = fused_layer_norm(hidden, weight, bias)
        return double, hidden + F.dropout(output, P), fused_rms_norm(hidden + output)

    def chain(branch, residual, weight, bias):
        hidden = residual + F.dropout(branch, P)
        output = fused_layer_norm(hidden, weight, bias)
        hidden = hidden + F.dropout(output, P)
        return fused_layer_norm(hidden, weight, bias), hidden

    leaves = inputs(torch.float32, device)
    (double, _, _), report = rewritten(function, *leaves)
    assert report == (1, {})
    expected = formula(layer_norm, *leaves, double / 2 != leaves[1])[1]
    torch.testing.assert_close(double / 2, expected)
    (output, hidden), report = rewritten(chain, *leaves)
    assert report == (2, {})
    torch.testing.assert_close(output, F.layer_norm(hidden, (COLS,), *leaves[2:]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wide", [None, torch.float32])
def test_roundings_of_the_norm(wide, dtype, device) -> None:
    """Catches values that are rounded before the weight though the sum is wide, or are not."""

    def function(branch, residual, weight):
        hidden = residual + F.dropout(branch, P)
        return fused_rms_norm(hidden, weight, 1e-3, rounding="before_weight"), hidden

    leaves = [t.detach() for t in inputs(dtype, device, wide)[:3]]
    (output, hidden), report = rewritten(function, *leaves)
    assert report == (1, {})
    expected = fused_rms_norm(hidden, leaves[2], 1e-3, rounding="before_weight")
    # With mixed types a GPU takes the sums of a row in another order.
    bound = 0.0 if wide is None else 1e-5
    torch.testing.assert_close(output, expected, rtol=bound, atol=bound)


def test_hooks_of_saved_tensors_see_nothing_of_the_pass(device) -> None:
    """Catches tensors without data that a hook, such as checkpoint's, gets while compiling."""
    leaves = inputs(torch.float32, device)
    compiled = torch.compile(layer_norm, fullgraph=True)
    with fused_op.compile_pass() as handle, inductor(generates_code=False):
        output, hidden = torch.utils.checkpoint.checkpoint(compiled, *leaves, use_reentrant=False)
        found = gradients((output, hidden), leaves)
    assert handle.report().forward == 1
    expected = formula(layer_norm, *leaves, hidden != leaves[1])
    torch.testing.assert_close(found, gradients(expected, leaves), rtol=1e-4, atol=1e-4)


def test_the_state_of_a_mask_is_on_the_device(device) -> None:
    """Catches a state on the host, for which the compiler gives up CUDA graphs."""
    states = []

    def look(graph: fx.Graph) -> None:
        op = torch.ops.fused_op.dropout_state.default
        states.extend(node.args[1] for node in graph.find_nodes(op="call_function", target=op))

    with (
        torch._inductor.config.patch(post_grad_custom_post_pass=look),
        inductor(generates_code=False),
        fused_op.compile_pass(),
        torch.no_grad(),
    ):
        torch.compile(layer_norm, fullgraph=True)(*inputs(torch.float32, device))
    assert states == [True]


@pytest.mark.parametrize("seed", range(16))
def test_random_calls(seed: int, device: str) -> None:
    """Catches a combination of shapes and options that nobody thought of."""
    rng = random.Random(SEED + seed)
    shape = [rng.randint(1, 5) for _ in range(rng.randint(0, 3))] + [rng.randint(2, 70)]
    last = rng.randint(1, len(shape))
    affine, centred = rng.random() < 0.7, rng.random() < 0.5
    norm, p = rng.choice([fused_layer_norm, fused_rms_norm]), rng.choice([0.5, 2**-16, 0.9])
    options = {"normalized_shape": shape[-last:], "zero_centered": centred, "eps": 1e-3}

    def function(branch: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        hidden = residual + F.dropout(branch, p)
        return norm(hidden, weight if affine else None, **options), hidden

    torch.manual_seed(SEED + seed)
    branch = torch.rand(shape, dtype=torch.float64, device=device) + 0.5
    residual, weight = torch.randn_like(branch), torch.randn(shape[-last:]).to(branch)
    leaves = [t.requires_grad_() for t in (branch, residual, weight)]
    found, report = rewritten(function, *leaves)
    assert report == (1, {})
    hidden = residual + branch * (found[1] != residual) / (1 - round(p * 2**16) / 2**16)
    expected = norm(hidden, weight if affine else None, **options), hidden
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients(found, leaves), gradients(expected, leaves))
