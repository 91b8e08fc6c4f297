"""Is every result right? Forward and all gradients of each op, beside the reference in fp64.

`python test_correctness.py` takes seconds and needs torch alone. `pytest test_correctness.py` walks
the whole table of tests/ops.py; tests/ asks the further questions (views, numerics, shapes, ...).
"""

import sys

import torch
import torch.nn.functional as F

from fused_op import fused_layer_norm, fused_op, reference
from tests.case import Case, generator, make_case
from tests.ops import DEVICES, OPS, PAIRS, pairwise, subsets

SMALL = [(5, 33), (2, 3, 64)]  # rows that end inside a vector, and rows that end with one

# Either side of what vectors, warps and blocks hold; rows alone, few and many.
SHAPES = [(1, 1), (3, 2), (257, 3), (1, 31), (2, 5, 255), (65, 1000), (4, 1023), (33, 2050)]
SHAPES += [(7, 4095), (130, 4096), (2, 8192), (1, 65537)]
LARGE = [(65537, 64), (4096, 5120), (1024, 16384), (129, 65536), (3, 262144)]  # CUDA only

ABSENT = subsets(("weight", "bias"))


def pytest_generate_tests(metafunc) -> None:
    """A test that takes `op`, `pair`, `device`, ... runs for each of them."""
    for name, values in {"op": OPS, "pair": PAIRS, "device": DEVICES, "shape": SMALL}.items():
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, values, ids=str)
    if "combination" in metafunc.fixturenames:
        table = [("cpu", *row) for row in pairwise(SHAPES, OPS, PAIRS, ABSENT)]
        if "cuda" in DEVICES:
            table += [("cuda", *row) for row in pairwise(SHAPES + LARGE, OPS, PAIRS, ABSENT)]
        ids = ["-".join(map(str, row)).replace("'", "") for row in table]
        metafunc.parametrize("combination", table, ids=ids)


def test_every_argument_and_every_gradient(op, device, pair, shape) -> None:
    """Catches a wrong formula for an absent argument, and a gradient that is wrong, missing or
    written where it was not asked for, in any subset of inputs that require grad."""
    for absent in subsets(op.parameters):
        case = make_case(op, shape, pair, device, absent)
        for wanted in subsets(case.present):
            results = case.run(wanted)
            expected = ("output", *(["sum"] if op.adds else []), *(f"grad_{n}" for n in wanted))
            assert tuple(results) == expected, f"{case}, gradients of {wanted}"
            case.check(results)


def test_further_shapes(combination) -> None:
    """Catches wrong tails, tiles and reductions at sizes where vectors, warps or blocks end."""
    device, shape, op, pair, absent = combination
    case = make_case(op, shape, pair, device, absent)
    case.check(case.run())


def test_no_rows(op, device, pair) -> None:
    """Catches parameter gradients that nobody writes when there is no row: they must be zero."""
    for shape in [(0, 33), (3, 0, 8), (2, 0), (0, 0)]:
        case = make_case(op, shape, pair, device)
        case.check(case.run())


def test_reference_is_pytorch(op, device) -> None:
    """Catches a wrong truth: in fp64 the reference is PyTorch's own norm, gradients included."""
    case = make_case(op, (7, 129), PAIRS[-1], device)
    outputs = []
    for ours in (True, False):
        leaves = case.leaves(case.present)
        if ours:
            out = op.reference(*leaves.values(), eps=case.eps)
            out = out[0] if op.adds else out
        else:
            x = leaves["input"] + (leaves["residual"] if op.adds else 0)
            params = [op.factor(leaves["weight"]), *([leaves["bias"]] if op.centred else [])]
            norm = F.layer_norm if op.centred else F.rms_norm
            out = norm(x, (129,), *params, eps=case.eps)
        outputs.append((out, *torch.autograd.grad(out, [*leaves.values()], case.grads[0])))
    for ours, theirs in zip(*outputs, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


def test_default_eps(op, device, pair) -> None:
    """Catches a default eps that is not PyTorch's, or that comes from the dtype of the input
    where statistics are fp32: rows this small are eps and little else."""
    case = make_case(op, (6, 40), pair, device)
    compute = torch.float64 if pair.rows is torch.float64 else torch.float32
    eps = 1e-5 if op.centred else torch.finfo(compute).eps
    inputs = {n: t if n in op.parameters else t * eps**0.5 for n, t in case.inputs.items()}
    case = Case(op, inputs, case.grads, eps)
    output = op.fused(*inputs.values())
    case.check({"output": output[0], "sum": output[1]} if op.adds else {"output": output})


def test_script(capsys) -> None:
    """Catches a script that does not say what its readers wait for."""
    main()
    said = capsys.readouterr().out
    for line in (FORWARD, GRADIENT, ALL):
        assert line in said.splitlines()


FORWARD = "✓ Forward pass matches reference"
GRADIENT = "✓ Gradient check passed"
ALL = "✅ All tests passed!"


def main() -> None:
    devices = " and ".join(DEVICES)
    print(f"Checking on {devices}" + ("" if "cuda" in DEVICES else " (no GPU found)"))
    for function in (fused_op, fused_layer_norm):
        for device in DEVICES:
            args = arguments(32, 128, device)
            error = (function(*args) - reference.fused_layer_norm(*args)).abs().max().item()
            assert error <= 1e-5, f"forward on {device} is off by {error:.3g}"
    print(FORWARD)
    for function in (fused_op, fused_layer_norm):
        for device in DEVICES:
            args = [t.requires_grad_() for t in arguments(8, 32, device)]
            assert torch.autograd.gradcheck(function, args, eps=1e-6, atol=1e-4)
    print(GRADIENT)
    print(ALL)


def arguments(rows: int, cols: int, device: str) -> list[torch.Tensor]:
    """Random input, weight and bias in fp64."""
    g = generator(device, rows, cols)
    shapes = [(rows, cols), (cols,), (cols,)]
    return [torch.randn(s, generator=g, device=device, dtype=torch.float64) for s in shapes]


if __name__ == "__main__":
    sys.exit(main())
