"""benchmarks/models.py and host.py measure what they say, on a CPU at tiny sizes."""

import dataclasses
import json
import sys

import pytest
import torch
from torch import nn

from benchmarks import host, model_table, models
from benchmarks.model_variants import (
    ADDITIONS,
    CONVERTED,
    MODELS,
    NATIVE,
    VARIANTS,
    Built,
    Variant,
    share,
)

pytest.importorskip("transformers")
CPU = torch.device("cpu")
BY_KIND = {model.kind: model for model in MODELS}


def row_of(model, mode="eager", variants=VARIANTS[:3]):
    return models.measure(model, mode, CPU, None, seconds=0.0, rounds=2, variants=variants)


@pytest.mark.parametrize("kind", BY_KIND)
def test_every_kind_of_model_is_measured(kind):
    """Catches a model that no longer builds, converts, or computes the same; the times are any."""
    if kind in ("sd3", "unet"):
        pytest.importorskip("diffusers")
    variants = row_of(BY_KIND[kind].small())["variants"]
    norms = {"qwen3": 9, "sd3": 8, "unet": 41, "convnext": 9}.get(kind, 5)
    assert variants[CONVERTED]["note"] == f"{norms} norms"
    # GPT-2's block adds inside of attention's and the MLP's calls.
    if kind in ("gpt2", "convnext"):
        assert "NothingToMeasure" in variants.pop(ADDITIONS)["failed"]
    else:
        moved = {"sd3": (0, 8, 0), "unet": (0, 0, 35)}.get(kind, (2, 0, 0))
        additions, modulations, activations = moved
        expected = f"{additions} additions, {modulations} modulations, {activations} activations"
        assert variants[ADDITIONS]["note"] == expected
    for figures in variants.values():
        for what in ("step", "forward"):
            assert figures[f"{what}_us"] > 0 and len(figures[f"{what}_rounds_us"]) == 2
        assert figures["loss"] == pytest.approx(variants[NATIVE]["loss"], rel=0.01)


def test_compiled_variants_are_three_programs():
    """Catches variants that share their graphs, as models of the same classes do."""
    model = dataclasses.replace(BY_KIND["llama"].small(), layers=1)
    variants = row_of(model, "torch.compile")["variants"]
    # The first norm of a layer adds nothing, and what the last one adds is a branch.
    note = "additions fused into norms: 2 forward, 2 backward"
    assert variants[ADDITIONS]["note"].splitlines()[0].startswith(note)
    assert all("step_us" in variants[name] for name in (NATIVE, CONVERTED, ADDITIONS))


def test_variants_share_parameters_and_leave_no_gradient():
    """Catches a variant that costs the memory of a second model, or adds to gradients."""
    native = BY_KIND["llama"].small().build(CPU)
    copied = share(native)
    assert copied is not native and next(copied.modules()) is not next(native.modules())
    pairs = zip(copied.parameters(), native.parameters(), strict=True)
    assert all(a is b for a, b in pairs)
    step = models.Step(VARIANTS[1], native, BY_KIND["llama"].small().inputs(CPU), "eager")
    step()
    assert all(p.grad is None for p in native.parameters())


@pytest.mark.parametrize("small", [False, True])
def test_models_have_the_sizes_of_their_names(small, monkeypatch, tmp_path):
    """Catches tiny models under the names of large ones: without --small, their own sizes."""
    measured = []

    def measure(model, *given, **options):
        measured.append(model)
        return {"model": model.name, "mode": given[0], "variants": {}}

    monkeypatch.setattr(models, "measure", measure)
    monkeypatch.setattr(models, "default_device", lambda: torch.device("cpu" if small else "cuda"))
    for name, result in {"CudaMeter": None, "tables": ""}.items():
        monkeypatch.setattr(models, name, lambda *_, result=result: result)
    monkeypatch.setattr(models.report, "environment", lambda *_: {"peers": {}})
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    command = ["models.py", "--json", str(tmp_path / "m.json"), "--mode", "eager"]
    monkeypatch.setattr(sys, "argv", command + ["--small"] * small)
    models.main()
    assert measured == [model.small() if small else model for model in MODELS]


def test_what_computes_something_else_is_no_figure():
    """Catches a variant that is fast because it is wrong, and a failure that takes others along."""

    def without_last_norm(model, mode):
        model.model.norm = nn.Identity()
        return Built(model)

    def broken(model, mode):
        raise RuntimeError("not here")

    wrong, failing = Variant("wrong", without_last_norm), Variant("failing", broken)
    small = BY_KIND["llama"].small()
    variants = row_of(small, variants=(VARIANTS[0], wrong, failing, VARIANTS[1]))["variants"]
    assert "its gradient_norm is" in variants["wrong"]["failed"]
    assert variants["failing"]["failed"] == "RuntimeError: not here"
    assert variants[NATIVE]["step_us"] > 0 and variants[CONVERTED]["step_us"] > 0
    variants = row_of(small, variants=(failing, VARIANTS[1]))["variants"]
    assert "the native model did not run" in variants[CONVERTED]["failed"]


def test_command_keeps_rows_and_goes_on(tmp_path, monkeypatch, capsys):
    """Catches rows that are lost or measured twice, and a run that goes on beyond its time."""
    file = tmp_path / "a.json"
    monkeypatch.setattr(models, "ROUNDS", 2)

    def run(*arguments):
        command = ["models", "--small", "--mode", "eager", "--json", str(file), *arguments]
        monkeypatch.setattr(sys, "argv", command)
        models.main()
        return capsys.readouterr().out, json.loads(file.read_text())

    _, first = run("--model", "tiny Llama")
    assert [row["model"] for row in first["rows"]] == ["tiny Llama"]
    names = ("--model", "tiny Llama", "--model", "ViT-L")
    text, second = run(*names, "--append")
    assert second["rows"][0] == first["rows"][0] and second["rows"][1]["model"] == "ViT-L"
    assert "| step of | native | converted | with additions |" in text
    text, _ = run("--append", "--minutes", "0")
    assert "No time was left for GPT-2 of 12 x 512, eager; " in text


def made_up_row(**factors):
    """A row in which each variant takes so many times the native time; rounds are 2 % apart."""
    variants = {
        name: {
            "step_us": 1000 * factor, "step_spread": 0.01,
            "forward_us": 300 * factor, "forward_spread": 0.01, "peak_bytes": 3 << 20,
        }
        for name, factor in ({NATIVE: 1.0} | factors).items()
    }  # fmt: skip
    size = {"batch": 2, "length": 16}
    return {"model": "M", "mode": "eager", "size": size, "variants": variants}


def test_tables_show_times_and_losers():
    """Catches a ratio of other cells, and a loss that is not told."""
    result = {"rows": [made_up_row(converted=0.9, Liger=1.5)]}
    text = model_table.tables(result)
    assert "| M, 2 x 16, eager | 1.00 ± 1.0 % | 0.90 ± 1.0 % (0.900) | 1.50 ± 1.0 % (1.500) |" in (
        text
    )
    assert "| M, 2 x 16, eager | 3 | 3 | 3 |" in text
    assert "No step of a converted model is slower" in text  # Liger's time is not ours
    assert "No step of a converted" in model_table.slower({"rows": [made_up_row(converted=1.015)]})
    slow = model_table.slower({"rows": [made_up_row(converted=1.03)]})
    assert slow == "Slower than native beyond the spread: M, eager, converted."


def test_host_time_of_each_op_and_mode():
    """Catches a call that fails, and a column that is missing."""
    text = host.table(host.measure(rounds=1, iterations=1))
    lines = text.splitlines()
    assert len(lines) == 2 + len([*host.OPS, *host.VARIANTS]) * len(host.DTYPES)
    assert all(line.count("|") == 2 + len(host.MODES) for line in lines)
