"""What has to hold of a model before convert, after it and after revert.

test_convert_architectures.py and test_convert_timm.py bring the models.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable

import torch
from torch import Tensor, nn

from fused_op import convert, revert
from fused_op.convert import Report
from tests.case import SEED, generator


def check_conversion(model: nn.Module, call: Callable[[nn.Module], Tensor]) -> Report:
    """Convert the model, and revert it after output, gradients and a training step are checked.

    Args:
        model: in ``eval`` mode, with random parameters in the dtype and on the device to check.
        call: the output of a model like it, in whichever dtype that has.

    Returns:
        What convert reported; revert gave as many norms their class back.
    """
    model.requires_grad_()
    # Without the short float32 of convolutions on a GPU, whose errors are larger than those of a
    # norm, and with the same bits each time.
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        # The truth begins with the parameters as the dtype has them.
        truth = run(copy.deepcopy(model).double(), call)
        before, state = run(model, call), copy.deepcopy(model.state_dict())
        bits = call(model)

        report = convert(model)
        assert_near(run(model, call), before, truth, next(model.parameters()).dtype)
        assert_state(model, state)
        train_a_step(model, call, report, state)

        model.load_state_dict(state)
        assert len(revert(model).converted) == len(report.converted)
        assert torch.equal(call(model), bits)
    return report


def run(model: nn.Module, call: Callable[[nn.Module], Tensor]) -> dict[str, Tensor]:
    """Output and the gradient of every parameter that has one."""
    model.zero_grad()
    y = call(model)
    y.backward(torch.randn(y.shape, generator=generator("cpu", "dy")).to(y))
    grads = {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}
    return {"output": y.detach().double()} | grads


def assert_near(
    after: dict[str, Tensor],
    before: dict[str, Tensor],
    truth: dict[str, Tensor],
    dtype: torch.dtype,
) -> None:
    """As near to the truth as the original: on the whole within twice its error, as two draws of
    rounding errors differ, and some roundings. A single gradient may be four times as far off: the
    error of some comes of the one or two roundings that their model amplifies (Mamba's). Others are
    zero but for rounding (a bias of the keys): for them, roundings of the largest gradient."""
    assert after.keys() == before.keys() == truth.keys()
    eps, largest = torch.finfo(dtype).eps, max(t.norm() for t in truth.values())
    ratios = {}
    for what, true in truth.items():
        bound = 2 * (before[what] - true).norm() + 8 * eps * true.norm() + eps * largest
        ratios[what] = ((after[what] - true).norm() / bound).item()
    worst = max(ratios, key=lambda what: ratios[what])
    assert ratios[worst] <= 4, f"{worst}: {ratios[worst]:.3g} of its bound (FUSED_OP_SEED={SEED})"
    whole = statistics.fmean(ratio**2 for ratio in ratios.values()) ** 0.5
    assert whole <= 0.7, f"all: {whole:.3g} of their bounds (FUSED_OP_SEED={SEED})"


def assert_state(model: nn.Module, state: dict[str, Tensor]) -> None:
    """The model has the keys and the bits of `state`."""
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


def train_a_step(
    model: nn.Module, call: Callable[[nn.Module], Tensor], report: Report, state: dict[str, Tensor]
) -> None:
    """An optimizer moves every parameter of the converted norms; `model` is in eval mode again."""
    # Adam moves a weight of 1 in bfloat16 whatever the size of its gradient.
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model.train()
    run(model, call)
    optimizer.step()
    model.eval()
    assert all(p.isfinite().all() for p in model.parameters())
    for converted in report.converted:
        for name, p in model.get_submodule(converted.name).named_parameters():
            assert not torch.equal(p, state[f"{converted.name}.{name}"]), (converted.name, name)
