"""Every Python example of the documentation runs, and what it links to, names or quotes is there.

Links inside of pages, and a page that is missing from the table of contents, are what building the
site fails at: `python -m sphinx -W -c docs . build/site`, in .ci/run.
"""

import ast
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks import cpu, gpu_tables, model_table, plot, tables
from benchmarks.peers import OURS
from fused_op.__main__ import covers

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
READMES = [page for page in (ROOT / "examples").rglob("README.md") if "build" not in page.parts]
NEEDED = {
    "from kernels import": "kernels",
    "from transformers import": "transformers",
    "integrations.hf_trainer import": "transformers",
}
EXAMPLES = [
    pytest.param(code, id=f"{page.name}-{i}")
    for page in PAGES
    for i, code in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S))
]


@pytest.mark.slow
@pytest.mark.parametrize("code", EXAMPLES)
def test_example(code: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches an example that raises, or that prints another report than the comment beside it."""
    for needing, package in NEEDED.items():
        if needing in code:
            pytest.importorskip(package)
    file = tmp_path / "example.py"  # convert reads the source of a block
    file.write_text(code)
    exec(compile(code, str(file), "exec"), {"__name__": "example"})
    printed = capsys.readouterr().out
    reports = re.findall(r"# (?:\.\.\. )?((?:norms changed|done by its norms): .*)", code)
    assert all(report in printed for report in reports)


@pytest.mark.parametrize("page", PAGES + READMES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page: Path) -> None:
    """Catches a link to a file that was moved."""
    targets = re.findall(r"\]\((?!http|#)([^)#]+)", page.read_text())
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing, f"{page.name} links to {missing}"


def names_in(file: str) -> set[str]:
    paths = [*(ROOT / "tests").rglob(file)]
    tree = ast.parse("\n".join(path.read_text() for path in paths))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_tests_exist(page: Path) -> None:
    """Catches a promise whose test was renamed or removed."""
    named = set(re.findall(r"(test_\w+\.py)::(\w+)", page.read_text()))
    missing = [f"{file}::{name}" for file, name in sorted(named) if name not in names_in(file)]
    assert not missing, f"{page.name} names {missing}"


def test_every_context_names_its_test() -> None:
    """Catches a row of the table of contexts that nothing shows."""
    rows = re.findall(r"^\| (?!context).*\|$", (ROOT / "docs/contexts.md").read_text(), re.M)
    assert len(rows) > 50
    assert not [row for row in rows if "::test_" not in row and "distributed.md" not in row]


@pytest.mark.parametrize("page", PAGES + READMES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands(page: Path) -> None:
    """Catches a command that calls a script or a module of ours that is gone, or is no shell."""
    places = [ROOT, page.parent, ROOT / "examples/templates/op", ROOT / "examples/scale_bias_relu"]
    for block in re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.M | re.S):
        subprocess.run(["bash", "-n"], input=block, text=True, check=True)
        named = re.findall(r"python ([\w/]+\.py)", block)
        modules = re.findall(r"python -m ((?:benchmarks|tests|fused_op)[\w.]*)", block)
        named += [f"{module.replace('.', '/')}.py" for module in modules if "." in module]
        missing = [n for n in named if not any((place / n).exists() for place in places)]
        assert not missing, f"{page.name} calls {missing}"


@pytest.mark.parametrize("table", tables.TABLES, ids=lambda table: table.name)
def test_tables_come_from_the_results(table: tables.Table, tmp_path: Path) -> None:
    """Catches figures on a page that the newest result file does not have, or has no longer."""
    page = tmp_path / table.page
    page.parent.mkdir(exist_ok=True)
    shutil.copy(ROOT / table.page, page)
    # Without a result, the page has to say so.
    assert not tables.write(table, pages=tmp_path), "run python -m benchmarks.tables"


@pytest.mark.parametrize("picture", plot.PICTURES, ids=lambda picture: picture.name)
def test_pictures_come_from_the_results(picture: plot.Picture) -> None:
    """Catches a picture of older results than the tables beside it, and one that no page shows."""
    drawn = tables.RESULTS / picture.name
    assert plot.source_in(drawn) == plot.source_hash(picture.sources()), (
        "run python -m benchmarks.plot"
    )
    shown = f"benchmarks/results/{picture.name})"
    assert any(shown in page.read_text() for page in PAGES)


def test_every_time_is_in_a_table_of_a_result() -> None:
    """Catches a row of a table that was measured and then written by hand."""
    for page in sorted({table.page for table in tables.TABLES}):
        by_hand = re.sub(
            r"<!-- (\w+):begin -->.*?<!-- \1:end -->", "", (ROOT / page).read_text(), flags=re.S
        )
        assert not re.findall(r"[\d.]+ µs \|", by_hand), page


def test_lessons_of_the_compiler_still_hold() -> None:
    """Catches what docs/add_your_own_op.md says of the table, when a new result says otherwise."""
    found = list(gpu_tables.pairs(json.loads(tables.newest().read_text())))
    near = {  # the share of calls in which the compiler is behind by 5 % at most
        mode: sum(pair.theirs <= 1.05 * pair.ours for pair in found if pair.mode == mode)
        / sum(pair.mode == mode for pair in found)
        for mode in ("forward", "backward")
    }
    assert near["forward"] > 0.2, "the compiler is no longer nearly there in forward"
    assert near["backward"] < near["forward"] / 2, "backward is no longer where a kernel pays"
    ahead = sorted(pair.ours / pair.theirs for pair in found if pair.is_loss)
    assert len(ahead) == 4, "the compiler is no longer ahead in four calls"
    assert 1.12 < ahead[-1] < 1.17, "no longer by a seventh for rows of one element"
    assert ahead[-2] < 1.065, "further than written"


def test_readme_says_what_a_model_gains() -> None:
    """Catches the sentence below the README's first picture, when a new result says otherwise."""
    (picture,) = (picture for picture in plot.PICTURES if picture.draw is plot.draw_steps)
    results = [json.loads(path.read_text()) for path in picture.sources()]
    timed = {label: by_name[OURS] for label, by_name in plot.steps(results)}
    times = {label: time for label, (time, _) in timed.items()}
    small = [time for label, time in times.items() if label.startswith("small Llama")]
    assert all(0.6 < time < 0.72 for time in small), "no longer a third of the step"
    assert small and 0.6 < times["Qwen3 0.6B, eager"] < 0.72, "no longer a third of the step"
    assert 0.86 < times["Llama 1B, eager"] < 0.89, "no longer an eighth"
    assert 0.81 < times["ConvNeXt, eager"] < 0.86, "no longer a sixth"
    assert 0.88 < times["UNet, eager"] < 0.92, "no longer a tenth"
    others = [time for label, time in timed.items() if re.search("(GPT-2|ViT).*eager", label)]
    assert others and all(abs(time - 1) < max(0.05, spread) for time, spread in others), (
        "no longer next to nothing"
    )
    slower = [label for label, time in times.items() if time > 1]
    assert len(slower) == 7, "no longer seven bars above 1"
    (models,) = (result for result in results if "model" in result.get("rows", [{}])[0])
    assert model_table.slower(models).startswith("No step of a converted model is slower")
    compiled = {r["model"]: r["variants"] for r in models["rows"] if r["mode"] == "torch.compile"}

    def with_pass(model: str) -> float:
        variants = compiled[model]
        return variants["with additions"]["step_us"] / variants["native"]["step_us"]

    assert 0.94 < with_pass("Qwen3 0.6B") < 0.96, "no longer a twentieth"
    assert 0.98 < with_pass("Llama 1B") < 1.02, "no longer nothing"


def test_readme_says_how_the_cpu_backend_compares() -> None:
    """Catches counts that the newest result does not have; the table's page is compared above."""
    path = tables.newest_in(tables.RESULTS / "cpu", "cpu")
    assert path is not None
    sentence = cpu.summary(json.loads(path.read_text())["rows"])
    words = " ".join((ROOT / "README.md").read_text().split())
    assert sentence.removeprefix("fused_op is ") in words


def gpus() -> list[tuple[str, str, str]]:
    """The table of GPUs: capability, whether nvcc 13 builds for it, which code it runs."""
    text = (ROOT / "docs/install.md").read_text()
    lines = re.findall(r"^\| ([\d., ]+) \| .+ \| (yes|no) \| (.+) \|$", text, re.M)
    return [(c, builds, runs) for many, builds, runs in lines for c in many.split(", ")]


def test_gpus_run_the_code_that_the_table_says() -> None:
    """Catches a table of GPUs that is not what setup.py builds and `python -m fused_op` accepts."""
    (default,) = re.findall(r"^DEFAULT_ARCHS = (\[.+?\])", (ROOT / "setup.py").read_text(), re.M)
    archs = ";".join(ast.literal_eval(default)) + "+PTX"
    assert len(gpus()) > 10
    for capability, _, runs in gpus():
        major, minor = map(int, capability.split("."))
        assert covers(archs, (major, minor)) == (not runs.startswith("none")), capability
        assert runs.startswith("none") or covers(runs, (major, minor)), capability


def test_gpus_are_those_of_nvcc() -> None:
    """Catches a GPU that nvcc 13 does not build for as the table says."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("needs nvcc")
    version, archs = (
        subprocess.run([nvcc, option], capture_output=True, text=True, check=True).stdout
        for option in ("--version", "--list-gpu-arch")
    )
    if "release 13." not in version:
        pytest.skip("needs nvcc 13")
    for capability, builds, _ in gpus():
        arch = f"compute_{capability.replace('.', '')}\n"
        assert (arch in archs) == (builds == "yes"), capability


QUOTED = {
    "setup.py": [
        "fused_op: USE_CUDA must be auto, 0 or 1, got ",
        ", but the CUDA backend cannot be built: ",
        "USE_CUDA is 1",
        "there is a GPU",
        " is a build without CUDA",
        "there is no nvcc, and torch ",
        " needs one of CUDA ",
        "there is no working nvcc in ",
        "; nor are there headers of CUDA ",
        "So only the C++ is compiled, with the headers in ",
        ", and every kernel is compiled when it is first called. nvcc ",
        "would put the kernels of common calls into the extension.",
        "and the major versions must agree",
        "USE_CUDA was 0 when fused_op was built",
        "or set USE_CUDA=0 to build for the CPU.",
    ],
    "fused_op/__init__.py": [
        "fused_op is not built, or was built for another torch than the installed ",
        "fused_op was built for torch ",
        "At the root of its repository, run: ",
        "pip install --force-reinstall --no-deps .",
        " was not built from the csrc/ and setup.py that are now in ",
        "python setup.py build_ext --inplace",
    ],
    "build_backend.py": ["fused_op: there is no torch to build for. Run: pip install torch"],
    "fused_op/__main__.py": ["NOT covered by this build"],
    "csrc/backend.cpp": [
        "fused_op was built without CUDA: ",
        " kernel could not be launched: ",
        "The cause may be an earlier kernel; CUDA_LAUNCH_BLOCKING=1 shows which.",
    ],
    "csrc/checks.cpp": [
        ": Tensor on device ",
        " is not on the expected device ",
        ": mixed dtype: expect parameter to have scalar type of ",
    ],
    "examples/scale_bias_relu/setup.py": [
        "there is a GPU but no nvcc; set CUDA_HOME, or USE_CUDA=0",
    ],
}


@pytest.mark.parametrize("source", QUOTED)
def test_errors_are_quoted_as_they_are_printed(source: str) -> None:
    """Catches a sentence that was rewritten in the code, and cannot be found in the page then."""
    page = " ".join((ROOT / "docs/troubleshooting.md").read_text().split())
    for sentence in QUOTED[source]:
        assert sentence in (ROOT / source).read_text(), sentence
        assert sentence.strip() in page, sentence


def test_reading_order_is_whole() -> None:
    """Catches a source file that is in no reading order: that of the page or of the kernels."""
    told = (ROOT / "docs/reading_the_code.md").read_text()
    told += (ROOT / "csrc/cuda/fused_op_kernel.cuh").read_text()
    files = [*ROOT.glob("fused_op/*.py"), *(file for file in ROOT.glob("csrc/**/*.*"))]
    # A header is told of with the file that it declares; core_*.cu differ in their dtypes alone.
    untold = {f.name for f in files if not re.search(rf"\b{f.stem}\.(py|cpp|h|cu|cuh)\b", told)}
    assert {n for n in untold if not re.match(r"core_\w+\.cu$", n)} == {"__init__.py"}


def test_citation_has_the_version_of_the_package() -> None:
    """Catches a release that raises the version in pyproject.toml alone."""
    (version,) = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    (cited,) = re.findall(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.M)
    assert cited == version
    assert f'"fused_op=={version}+' in (ROOT / "docs/install.md").read_text()


def test_examples_page_shows_what_they_printed(tmp_path: Path) -> None:
    """Catches a recorded run that never reaches the page, or reaches it with a dead link."""
    page = tmp_path / "examples/README.md"
    page.parent.mkdir()
    shutil.copy(ROOT / "examples/README.md", page)
    environment = json.loads(tables.newest().read_text())["environment"]
    results = tmp_path / "results"
    results.mkdir()
    result = {"environment": environment, "printed": {"square": "us a call 1.5"}}
    (results / "gpu.json").write_text(json.dumps(result))
    (table,) = (table for table in tables.TABLES if table.name == "examples")
    table = table._replace(folder=results)
    assert tables.write(table, pages=tmp_path)
    assert "`square`:\n\n```text\nus a call 1.5\n```" in page.read_text()
    assert not tables.write(table, pages=tmp_path)
