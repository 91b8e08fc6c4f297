"""``compile_pass``: additions move into the norms beside them, where that changes nothing else."""

import pickle
import random
import re
import uuid

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fused_op
from fused_op import fused_layer_norm, fused_rms_norm
from tests.case import SEED


@pytest.fixture(autouse=True)
def is_clean():
    """Nothing compiled is left for another test, and no pass in Inductor.

    Without Inductor's caches on disk: a graph that an earlier run left there counts nothing.
    """
    torch.compiler.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        yield
    torch.compiler.reset()
    assert torch._inductor.config.post_grad_custom_pre_pass is None
    assert torch._inductor.config.pre_grad_custom_pass is None


def inductor(generates_code: bool):
    """Inductor with C++ of its own for a graph, or with PyTorch's kernels alone.

    The pass only changes graphs, and g++ needs ten seconds for the code of a small model. An older
    torch has no such switch and always generates code.
    """
    config = torch._inductor.config
    is_known = hasattr(config, "fallback_by_default")
    return config.patch({"fallback_by_default": not generates_code} if is_known else {})


class Block(nn.Module):
    """A decoder layer of Llama, with a linear layer in the place of attention."""

    def __init__(self, size: int, norm: type[nn.Module] = fused_op.FusedRMSNorm) -> None:
        super().__init__()
        self.norms = nn.ModuleList(norm(size) for _ in range(2))
        self.attention = nn.Linear(size, size, bias=False)
        self.up = nn.Linear(size, 2 * size, bias=False)
        self.down = nn.Linear(2 * size, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.down(F.silu(self.up(self.norms[1](x))))


def model_of(norm: type[nn.Module] = fused_op.FusedRMSNorm, blocks: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(16, norm) for _ in range(blocks)), norm(16))


def compiled(function, *inputs: Tensor, parameters=(), **options) -> list[Tensor]:
    """Outputs, and the gradients of what needs one, of a function that is compiled anew."""
    torch.compiler.reset()
    outputs = torch.compile(function, fullgraph=True, **options)(*inputs)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    leaves = [t for t in (*inputs, *parameters) if t.requires_grad]
    loss = sum(o.float().cos().sum() for o in outputs)
    return [*outputs, *(torch.autograd.grad(loss, leaves) if leaves else ())]


def both(function, *inputs: Tensor, parameters=(), **options):
    """The results without the pass and with it, and its report."""
    parameters = list(parameters)
    without = compiled(function, *inputs, parameters=parameters, **options)
    with fused_op.compile_pass() as handle:
        found = compiled(function, *inputs, parameters=parameters, **options)
    return without, found, handle.report()


@pytest.mark.slow
@pytest.mark.parametrize("norm", [fused_op.FusedRMSNorm, fused_op.FusedLayerNorm])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_llama_like_model(norm, dtype, device: str) -> None:
    """Catches an addition that stays, or one that is fused into other numbers."""
    model = model_of(norm, blocks=1).to(device, dtype)
    x = torch.randn(3, 7, 16, device=device, dtype=dtype, requires_grad=True)
    # Generated code keeps bfloat16 sums in float32: there, one norm runs it.
    with inductor(norm is fused_op.FusedRMSNorm and dtype is torch.bfloat16):
        without, found, report = both(model, x, parameters=model.parameters())
    assert report == (2, 2, 0, {})
    assert str(report) == "additions fused into norms: 2 forward, 2 backward"
    assert torch.equal(without[0], found[0])  # the sum is rounded in both
    if dtype is torch.bfloat16:  # of the gradients, once instead of twice
        torch.testing.assert_close(found, without, rtol=5e-2, atol=5e-2)
    elif device == "cpu":
        assert all(map(torch.equal, found, without))
    else:
        torch.testing.assert_close(found, without, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_rows_of_images(device: str) -> None:
    """Catches an addition of gradients that stays because what is saved has a fifth dimension."""
    model = model_of(blocks=1).to(device)
    x = torch.randn(2, 3, 5, 16, device=device, requires_grad=True)
    with inductor(generates_code=False):
        without, found, report = both(model, x, parameters=model.parameters())
    assert report == (2, 2, 0, {})
    torch.testing.assert_close(found, without, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "dim"), [((4, 16), 1), ((4, 16), 0), ((4, 6, 16), 0)])
def test_dimensions_of_the_model(shape, dim, device: str) -> None:
    """Catches a dimension that the model put around a norm, taken for the one of what is saved."""
    weight = torch.linspace(0.5, 1.5, 16, device=device, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        return x + (fused_rms_norm(x.unsqueeze(dim), weight) * 2).squeeze(dim)

    x = torch.randn(shape, device=device, requires_grad=True)
    without, found, _ = both(function, x, parameters=[weight], dynamic=False)
    torch.testing.assert_close(found, without, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_autocast(device: str) -> None:
    """Catches a float32 residual stream that loses bits beside branches of 16 bits."""
    model = model_of().to(device)
    x = torch.randn(3, 7, 16, device=device, requires_grad=True)
    with torch.autocast(device, torch.bfloat16), inductor(generates_code=False):
        without, found, report = both(model, x, parameters=model.parameters())
    assert report == (4, 4, 0, {})
    assert torch.equal(without[0], found[0]) and found[0].dtype is torch.float32
    torch.testing.assert_close(found, without, rtol=1e-5, atol=1e-6)


def test_roundings_of_a_wide_sum(device: str) -> None:
    """Catches values that are rounded to the 16 bits of a branch, where the sum has 32."""
    weight = torch.linspace(0.5, 1.5, 16, device=device)

    def function(x: Tensor, y: Tensor) -> Tensor:
        return fused_rms_norm(x + y.cumsum(0), weight, rounding="before_weight")

    x = torch.randn(16, 16, device=device)
    with inductor(generates_code=False):
        without, found, report = both(function, x, torch.randn_like(x).bfloat16())
    assert report.forward == 1
    torch.testing.assert_close(found, without, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_inference_and_dynamic_shapes(device: str) -> None:
    """Catches a pass that needs a gradient, or the number of rows."""
    model = model_of().to(device)
    for options in ({}, {"dynamic": True}):
        with torch.no_grad(), inductor(generates_code="dynamic" in options):
            without, found, report = both(model, torch.randn(5, 16, device=device), **options)
        assert report == (4, 0, 0, {}) and torch.equal(without[0], found[0])


def test_rows_that_only_the_data_tells() -> None:
    """Catches a comparison of sizes that nobody knows."""
    weight = torch.randn(16)

    def function(x: Tensor, mask: Tensor, matrix: Tensor) -> Tensor:
        rows = x[mask]
        return fused_rms_norm(rows + rows @ matrix, weight)

    x, mask, matrix = torch.randn(9, 16), torch.arange(9) % 2 == 0, torch.randn(16, 16)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        without, found, report = both(function, x, mask, matrix)
    assert torch.equal(without[0], found[0]) and report.forward == 1


def test_norms_of_pytorch_and_converted_ones() -> None:
    """Catches switches that do not work together."""
    x = torch.randn(6, 16)
    plain = model_of(nn.LayerNorm)
    expected = plain(x)
    with fused_op.override_torch(), fused_op.compile_pass() as handle:
        torch.testing.assert_close(compiled(plain, x)[0], expected, rtol=1e-5, atol=1e-5)
    assert handle.report().forward == 4
    fused_op.convert(plain)
    torch.compiler.reset()
    with torch.no_grad(), fused_op.compile_pass() as handle:
        torch.testing.assert_close(compiled(plain, x)[0], expected, rtol=1e-5, atol=1e-5)
    assert handle.report() == (4, 0, 0, {})


@pytest.mark.slow
def test_llama_of_transformers() -> None:
    """Catches a graph of a real model that looks otherwise, and losses that part."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    losses = []
    for is_on in (False, True):
        torch.compiler.reset()
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = fused_op.compile_pass() if is_on else None
        if is_on:
            fused_op.convert(model)
        step = torch.compile(model)
        ids = torch.arange(64).view(4, 16) % 32
        with inductor(generates_code=False):
            for _ in range(3):
                loss = step(input_ids=ids, labels=ids, use_cache=False).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        if handle:
            handle.undo()
            report = handle.report()
    assert losses[:3] == pytest.approx(losses[3:], rel=1e-5)
    assert report.forward == 4 and report.backward == 4, report


WEIGHT = torch.linspace(0.5, 1.5, 16)
UNTOUCHED = {
    "scaled": (
        lambda x, y: fused_rms_norm(torch.add(x, y @ y.T @ x, alpha=2), WEIGHT),
        "the addition broadcasts, scales or converts",
    ),
    "broadcast": (
        lambda x, y: fused_rms_norm(x + (y @ y.T)[0, :16], WEIGHT),
        "the addition broadcasts, scales or converts",
    ),
    "another dtype": (
        # No product: Inductor of torch 2.7 makes an addmm of it, whose operands differ in dtype.
        lambda x, y: fused_rms_norm(x.double() + y.cumsum(0), WEIGHT),
        "the addition broadcasts, scales or converts",
    ),
    "a number": (
        lambda x, y: fused_rms_norm((x @ y.T) + 1.0, None),
        "the addition broadcasts, scales or converts",
    ),
    "a pointwise operand": (
        lambda x, y: fused_rms_norm(x + y * y, WEIGHT),
        "Inductor fuses the addition with what computes its operand",
    ),
    "columns in memory": (
        lambda x, y: fused_rms_norm(x.T + y.T, None),
        "the sum does not lie in memory row by row",
    ),
    "a later weight": (
        lambda x, y: (lambda s: fused_rms_norm(s, (s @ s.T)[0] * y[0].sum()))(x + y),
        "the parameters of the norm are computed after the addition",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", UNTOUCHED)
def test_what_stays(name: str) -> None:
    """Catches a rewrite that would change values, and one that is no gain; each says why."""
    function, reason = UNTOUCHED[name]
    x, y = torch.randn(2, 16, 16)
    with inductor(generates_code=False):
        without, found, report = both(function, x, y)
    assert report == (0, 0, 0, {reason: 1})
    assert torch.equal(without[0], found[0])


def test_dropout_of_the_output_stays() -> None:
    """Catches dropout that moves from the output of a norm to its input."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        return fused_layer_norm(x + y, WEIGHT, dropout_p=0.5)

    with fused_op.compile_pass() as handle:
        output = compiled(function, *torch.randn(2, 64, 16))[0]
    assert handle.report() == (0, 0, 0, {"dropout follows the norm": 1})
    assert 0.3 < output.count_nonzero() / output.numel() < 0.7


def test_sums_that_are_used_elsewhere() -> None:
    """Catches users of the sum that get something else: before, after, as output, in place."""

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        total = x + y
        early = total.exp()
        first, second = fused_rms_norm(total, WEIGHT), fused_layer_norm(total, WEIGHT)
        changed = total.clone().mul_(2)
        return total, early, first, second, changed + first

    x, y = torch.randn(2, 8, 16).requires_grad_().unbind()
    without, found, report = both(function, x.detach(), y.detach())
    assert report.forward == 1
    assert all(map(torch.equal, without, found))


def test_inputs_that_change_in_place() -> None:
    """Catches an addition that moves behind a change of what it adds."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        total = x + y
        x.mul_(3)
        output = fused_rms_norm(total, WEIGHT)
        y.zero_()
        return output + x

    runs = []
    for is_on in (False, True):
        torch.manual_seed(0)
        x, y = torch.randn(8, 16), torch.randn(8, 16)
        handle = fused_op.compile_pass() if is_on else None
        runs.append([*compiled(function, x, y), x, y])
        if handle:
            handle.undo()
            assert handle.report().forward == 1
    assert all(map(torch.equal, *runs))


@pytest.mark.slow
def test_gradient_that_needs_the_norms_own_stays() -> None:
    """Catches a kernel that would wait for its own result."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        return fused_rms_norm(x, y[0]).cos() @ y + x * 2

    x, y = (torch.randn(16, 16, requires_grad=True) for _ in range(2))
    with inductor(generates_code=False):
        without, found, report = both(function, x, y)
    torch.testing.assert_close(found, without, rtol=1e-5, atol=1e-6)
    assert report.forward == 0


def random_program(rng: random.Random):
    """A function of random additions, norms, products and elementary operations."""
    steps = [
        (rng.choice(["add", "add", "norm", "norm", "mm", "sin", "T"]), rng.random(), rng.random())
        for _ in range(rng.randint(4, 14))
    ]
    norms = [rng.choice([fused_rms_norm, fused_layer_norm]) for _ in steps]

    def program(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        values = [x, y]
        for (kind, i, j), norm in zip(steps, norms, strict=True):
            a, b = values[int(i * len(values))], values[int(j * len(values))]
            if kind == "add":
                values.append(a + b)
            elif kind == "norm":
                values.append(norm(a, weight if j < 0.7 else None))
            else:
                values.append({"mm": lambda a=a, b=b: a @ b, "sin": a.sin, "T": a.t}[kind]())
        return tuple(values[-3:])

    return program


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_random_programs(seed: int) -> None:
    """Catches a graph that nobody thought of."""
    rng = random.Random(SEED + seed)
    program = random_program(rng)
    torch.manual_seed(SEED + seed)
    x, y = (torch.randn(12, 12, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight = torch.randn(12, dtype=torch.float64, requires_grad=True)
    torch.compiler.reset()
    outputs = program(x, y, weight)
    leaves = [x, y, weight]
    loss = sum(o.cos().sum() for o in outputs)
    expected = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    with inductor(generates_code=seed < 2), fused_op.compile_pass() as handle:
        found = torch.compile(program, fullgraph=True)(x, y, weight)
        loss = sum(o.cos().sum() for o in found)
        grads = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    print(handle.report())
    torch.testing.assert_close(found, outputs, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(grads, expected, rtol=1e-7, atol=1e-7)


def test_undo_caches_and_the_pass_of_a_user() -> None:
    """Catches code of another state out of a cache, and a user's pass that is lost."""
    from torch._inductor.utils import run_and_get_code

    model, x = model_of(), torch.randn(4, 16)
    seen: list[int] = []
    of_this_run = uuid.uuid4().bytes  # apart from what an earlier run left in Inductor's caches

    class Users(torch._inductor.custom_graph_pass.CustomGraphPass):
        def __call__(self, graph) -> None:
            seen.append(len(graph.nodes))

        def uuid(self):
            return of_this_run

    options = {"post_grad_custom_pre_pass": (users := Users()), "force_disable_caches": False}
    for is_on in (True, False, True):
        torch.compiler.reset()
        with torch._inductor.config.patch(options), torch.no_grad():
            handle = fused_op.compile_pass() if is_on else None
            _, code = run_and_get_code(torch.compile(model, fullgraph=True), x)
            if handle:
                handle.undo()
                handle.undo()
            assert torch._inductor.config.post_grad_custom_pre_pass is users
        calls = re.findall(r"norm_forward\.default\('rms_norm', \w+, (\w+)", "".join(code))
        assert calls.count("None") == (1 if is_on else 5) and len(calls) == 5
    assert seen


def test_handles_that_are_undone_in_the_order_of_their_making() -> None:
    """Catches a pass that stays in a slot because another one was around it."""
    first, second = fused_op.compile_pass(), fused_op.compile_pass()
    first.undo()
    second.undo()
    assert torch._inductor.config.pre_grad_custom_pass is None  # the other slot: `is_clean`


def test_each_pass_has_a_name_of_its_own() -> None:
    """Catches code from one of Inductor's caches that another pass, or version of it, had made."""
    from fused_op._inductor import _version

    names, keys = [], []
    for handle in (fused_op.compile_pass, fused_op.override_torch):
        with handle():
            found = torch._inductor.config.pre_grad_custom_pass
            names.append(found.uuid())
            keys.append(pickle.dumps(found))  # some versions of torch make a key of this
    assert names[0] != names[1] and all(_version() in name for name in names)
    assert keys[0] != keys[1]
