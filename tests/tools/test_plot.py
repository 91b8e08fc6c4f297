"""The figures that benchmarks.plot takes from results; test_benchmark.py draws one."""

from benchmarks import model_variants, plot
from benchmarks.peers import OURS


def block(us, spread=0.1):
    variants = {name: {"us": us[name], "spread": spread} for name in us}
    row = {"op": "add_rms_norm", "hidden": 64, "mode": "torch.compile", "variants": variants}
    return {"blocks": [row]}


def test_blocks_are_shown_beside_the_example():
    """Catches a ratio turned around, and a variant under another's name."""
    times = {"torch.nn.RMSNorm": {"ms": 4.0}, OURS: {"ms": 3.0}, "Liger": {"ms": 5.0}}
    llama = {"size": {"layers": 2, "width": 8}, "compile": False, "variants": times}
    shown = dict(plot.steps([llama, block({"PyTorch": 4.0, OURS: 2.0, "Liger": 6.0})]))
    assert shown == {
        "small Llama, 2 layers of 8, eager": {OURS: (0.75, 0.0), "Liger": (1.25, 0.0)},
        "block of width 64, RMSNorm, compiled": {OURS: (0.5, 0.1), "Liger": (1.5, 0.1)},
    }


def test_whole_models_take_the_place_of_blocks():
    """Catches a picture that goes on showing blocks once models are measured, or loses a bar."""
    names = (model_variants.NATIVE, model_variants.CONVERTED, model_variants.ADDITIONS)
    cells = {
        name: {"step_us": us, "step_spread": 0.2}
        for name, us in zip(names, (8.0, 6.0, 4.0), strict=True)
    }
    row = {"model": "GPT", "mode": "eager", "variants": cells | {"Liger": {"failed": "absent"}}}
    shown = dict(plot.steps([{"rows": [row]}, block({"PyTorch": 1.0, OURS: 1.0})]))
    assert shown == {
        "GPT, eager": {OURS: (0.75, 0.2), f"{OURS} {model_variants.ADDITIONS}": (0.5, 0.2)}
    }
