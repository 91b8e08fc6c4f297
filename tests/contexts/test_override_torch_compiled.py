"""``override_torch`` and ``torch.compile``: which norms a compiled graph calls."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fused_op

pytestmark = [
    pytest.mark.filterwarnings("error:fused_op"),
    pytest.mark.usefixtures("override_ends"),
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(16), nn.Linear(16, 16)
        self.last = nn.RMSNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.linear(self.norm(x)))


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [True, False])
def test_inductor(device: str, compiled: bool) -> None:
    """Catches compiled code with the wrong norms, graph breaks, and a cache that mixes them up."""
    from torch._inductor.utils import run_and_get_code

    torch.compiler.reset()
    model = Block().to(device)
    x = torch.randn(6, 16, device=device, requires_grad=True)
    leaves = [x, *model.parameters()]
    eager = model(x)
    expected = torch.autograd.grad(eager.square().sum(), leaves)
    for is_on in (True, False, True):  # caches that another state has filled
        torch.compiler.reset()
        override = fused_op.override_torch(compiled=compiled) if is_on else None

        def run():
            output = torch.compile(model, fullgraph=True)(x)
            return output, torch.autograd.grad(output.square().sum(), leaves)

        (output, grads), code = run_and_get_code(run)
        torch.testing.assert_close((output, grads), (eager, expected), rtol=1e-4, atol=1e-4)
        ours = sum(text.count("fused_op.norm_forward.default(") for text in code)
        assert ours == (2 if is_on and compiled else 0)
        if override:
            override.undo()
            counts = override.report().compiled
            assert counts in ({"replaced": 2}, {}) if compiled else counts == {}  # {}: cached
    assert torch._inductor.config.pre_grad_custom_pass is None
    torch.compiler.reset()


def test_inductor_keeps_what_no_kernel_takes_and_the_pass_of_a_user() -> None:
    """Catches a graph that our pass breaks, and a user's pass that it drops."""
    torch.compiler.reset()
    seen = []
    torch._inductor.config.pre_grad_custom_pass = seen.append
    x, weight = torch.randn(4, 8), torch.randn(8, dtype=torch.float64)
    try:
        with fused_op.override_torch() as override:
            function = torch.compile(lambda x, weight: F.rms_norm(x, (8,), weight), fullgraph=True)
            torch.testing.assert_close(function(x, weight), F.rms_norm(x, (8,), weight))
        assert override.report().compiled == {"kept": 1} and len(seen) == 1
        assert torch._inductor.config.pre_grad_custom_pass == seen.append
    finally:
        torch._inductor.config.pre_grad_custom_pass = None
        torch.compiler.reset()


def test_other_backends_of_compile_call_our_kernels() -> None:
    """Catches a graph of PyTorch's ops that runs PyTorch's kernels."""
    torch.compiler.reset()
    x = torch.randn(4, 8, requires_grad=True)
    with fused_op.override_torch() as override:
        function = torch.compile(lambda x: F.layer_norm(x, (8,)), backend="aot_eager")
        function(x).sum().backward()
    assert override.report().ours == {"native_layer_norm": 1, "native_layer_norm_backward": 1}
    torch.compiler.reset()
