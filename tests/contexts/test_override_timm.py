"""A ViT of timm under ``override_torch``: every one of its norms runs our kernels."""

import pytest
import torch

import fused_op

# As in tests/convert/test_convert_timm.py.
timm = pytest.importorskip("timm", reason="timm, or the torchvision it imports, is not installed")

SIZES = {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 8}


@pytest.mark.parametrize(
    ("op", "options", "count"),
    [  # two norms a block and the last one; with qk_norm also those of queries and keys
        ("native_layer_norm", {}, 5),
        ("native_layer_norm", {"qk_norm": True}, 9),
        ("_fused_rms_norm", {"qk_norm": True, "norm_layer": "rmsnorm"}, 9),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_vit(op: str, options: dict, count: int, dtype: torch.dtype, device: str) -> None:
    """Catches a norm that calls something else, or is taken by PyTorch's kernel unnoticed."""
    if not hasattr(torch.ops.aten, op):
        pytest.skip("this torch has no op for the RMS norm")
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", **SIZES, **options).to(device, dtype)
    images = torch.randn(2, 3, 32, 32, device=device, dtype=dtype)

    def step() -> list[torch.Tensor]:
        model.zero_grad()
        output = model(images)
        output.float().cos().sum().backward()
        return [output, *(p.grad for p in model.parameters())]

    expected = step()
    with fused_op.override_torch() as override:
        found = step()
    report = override.report()
    assert {name: n for name, n in report.ours.items() if n} == {op: count, f"{op}_backward": count}
    assert not report.torchs
    # Some gradients are zero but for rounding, as that of a bias of the keys.
    eps, largest = torch.finfo(dtype).eps, max(t.double().norm() for t in expected[1:])
    for one, other in zip(found, expected, strict=True):
        error = (one.double() - other.double()).norm()
        assert error <= 30 * eps * other.double().norm() + 4 * eps * largest
    assert all(map(torch.equal, step(), expected))  # PyTorch's kernels again
