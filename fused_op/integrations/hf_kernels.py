"""Layers for the ``kernels`` library of Hugging Face, without a download from its hub.

    import fused_op.integrations.hf_kernels
    fused_op.integrations.hf_kernels.register()
    model.set_use_kernels(True)  # or kernels.kernelize(model, mode=...)

``kernels`` puts ``forward`` of a layer here into modules of the model. So a layer has no state and
no methods of its own, and reads those of the module. The flags say what ``kernels`` may use it for.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..functional import fused_layer_norm, fused_rms_norm


class RMSNorm(nn.Module):
    """The slot "RMSNorm": ``weight`` and ``variance_epsilon``, as in Llama."""

    has_backward = True
    can_torch_compile = True
    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return fused_rms_norm(
            hidden_states, self.weight, self.variance_epsilon, rounding="before_weight"
        )


class RMSNormZeroCentered(nn.Module):
    """The slot "RMSNormZeroCentered": the factor is ``1 + weight``, as in Qwen3.5."""

    has_backward = True
    can_torch_compile = True
    weight: Tensor
    eps: float

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return fused_rms_norm(x, self.weight, self.eps, zero_centered=True)


class LayerNorm(nn.Module):
    """The slot "LayerNorm": attributes as in ``torch.nn.LayerNorm``."""

    has_backward = True
    can_torch_compile = True
    normalized_shape: tuple[int, ...]
    weight: Tensor | None
    bias: Tensor | None
    eps: float

    def forward(self, input: Tensor) -> Tensor:
        """Normalise the last dimensions."""
        return fused_layer_norm(
            *(input, self.weight, self.bias, self.eps), normalized_shape=self.normalized_shape
        )


class Layer:
    """A layer of this file, where ``kernels`` expects a repository that it is loaded from."""

    def __init__(self, layer: type[nn.Module]) -> None:
        """See the class."""
        self._layer = layer

    def load(self) -> type[nn.Module]:
        """Return the class, which is here already."""
        return self._layer

    def __eq__(self, other: object) -> bool:
        """By class: ``kernels`` remembers what it has loaded."""
        return isinstance(other, Layer) and self._layer is other._layer

    def __hash__(self) -> int:
        """Of the class."""
        return hash(self._layer)

    def __str__(self) -> str:
        """For messages of ``kernels``."""
        return f"fused_op, layer `{self._layer.__name__}`"


LAYERS = (RMSNorm, RMSNormZeroCentered, LayerNorm)


def mapping() -> dict[str, dict[str, Any]]:
    """The argument of ``kernels.use_kernel_mapping``: each layer, on the CPU and on CUDA."""
    return {layer.__name__: dict.fromkeys(("cpu", "cuda"), Layer(layer)) for layer in LAYERS}


def register() -> None:
    """Give these layers to ``kernels`` for all modes, over what the slots hold now.

    Raises:
        ImportError: ``kernels`` is not installed.
    """
    from kernels import Mode, register_kernel_mapping

    # For each mode by name: a repository for any other mode would be asked last.
    modes = (
        Mode.TRAINING,
        Mode.INFERENCE,
        Mode.TRAINING | Mode.TORCH_COMPILE,
        Mode.INFERENCE | Mode.TORCH_COMPILE,
        Mode.FALLBACK,
    )
    register_kernel_mapping(
        {
            name: {device: dict.fromkeys(modes, layer) for device, layer in devices.items()}
            for name, devices in mapping().items()
        }
    )
