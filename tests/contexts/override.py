"""What the tests of ``override_torch`` share: PyTorch's norms and their arguments."""

import torch
import torch.nn.functional as F
from torch import Tensor

RMS_IS_AN_OP = hasattr(torch.ops.aten, "_fused_rms_norm_backward")  # from torch 2.9 on
NORMS = ["layer_norm", "rms_norm"] if RMS_IS_AN_OP else ["layer_norm"]
BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}


def arguments(name: str, device: str = "cpu", dtype: torch.dtype = torch.float32, cols: int = 33):
    tensors = [torch.randn(5, 7, cols, device=device, dtype=dtype, requires_grad=True)]
    for _ in range(2 if name == "layer_norm" else 1):
        tensors.append(torch.randn(cols, device=device, dtype=dtype, requires_grad=True))
    return tensors


def results(name: str, tensors: list[Tensor]) -> list[Tensor]:
    """Output and gradients of PyTorch's function."""
    input, *parameters = tensors
    output = getattr(F, name)(input, parameters[0].shape, *parameters)
    return [output, *torch.autograd.grad(output.float().cos().sum(), tensors)]
