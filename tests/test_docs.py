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

from benchmarks import cpu, docs_table, readme_table
from fused_op.__main__ import covers

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
READMES = [page for page in (ROOT / "examples").rglob("README.md") if "build" not in page.parts]
EXAMPLES = [
    pytest.param(code, id=f"{page.name}-{i}")
    for page in PAGES
    for i, code in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S))
]


@pytest.mark.parametrize("code", EXAMPLES)
def test_example(code: str) -> None:
    """Catches a page that shows what the library no longer does: an example that raises."""
    exec(compile(code, "example", "exec"), {"__name__": "example"})


@pytest.mark.parametrize("page", PAGES + READMES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page: Path) -> None:
    """Catches a link to a file that was moved."""
    targets = re.findall(r"\]\((?!http|#)([^)#]+)", page.read_text())
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing, f"{page.name} links to {missing}"


def names_in(file: str) -> set[str]:
    path = ROOT / "tests" / file
    tree = ast.parse(path.read_text() if path.exists() else "")
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


def test_tables_come_from_the_results(tmp_path: Path) -> None:
    """Catches figures on a page that the newest result file does not have, or has no longer."""
    pages = ("performance.md", "add_your_own_op.md")
    for page in pages:
        shutil.copy(ROOT / "docs" / page, tmp_path)
    path = readme_table.newest()
    changed = docs_table.write(json.loads(path.read_text()), path.resolve(), tmp_path)
    assert not changed, "run python -m benchmarks.docs_table"
    assert not docs_table.write_profile(tmp_path / "performance.md"), "the same"
    assert not docs_table.write_few_odd_rows(tmp_path / "performance.md"), "the same"
    assert not docs_table.write_cpu(tmp_path / "performance.md"), "the same"
    assert not docs_table.write_examples(), "the same"
    for page in pages:  # each figure is between markers
        text = (ROOT / "docs" / page).read_text()
        by_hand = re.sub(r"<!-- (\w+):begin -->.*?<!-- \1:end -->", "", text, flags=re.S)
        assert not re.findall(r"[\d.]+ µs \|", by_hand)


def test_lessons_of_the_compiler_still_hold() -> None:
    """Catches what docs/add_your_own_op.md says of the table, when a new result says otherwise."""
    found = list(docs_table.pairs(json.loads(readme_table.newest().read_text())))
    near = {  # the share of calls in which the compiler is behind by 5 % at most
        mode: sum(pair.theirs <= 1.05 * pair.ours for pair in found if pair.mode == mode)
        / sum(pair.mode == mode for pair in found)
        for mode in ("forward", "backward")
    }
    assert near["forward"] > 0.2, "the compiler is no longer nearly there in forward"
    assert near["backward"] < near["forward"] / 2, "backward is no longer where a kernel pays"
    assert not any(pair.is_loss for pair in found), "the compiler is ahead somewhere"


def test_cpu_backend_is_faster_in_four_of_five_layer_norms() -> None:
    """Catches what the pages say of the CPU backend, when a new result says otherwise."""
    path = readme_table.newest_in(docs_table.CPU, "cpu")
    assert path is not None
    rows = json.loads(path.read_text())["rows"]
    slower = [row["op"] for row in rows if cpu.speedup(row) < 1]
    assert set(slower) == {"layer_norm"}, "the pages say that only PyTorch's layer norm is faster"
    share = len(slower) / sum(row["op"] == "layer_norm" for row in rows)
    assert 0.1 < share < 0.25, "the pages say that PyTorch's layer norm is faster in one of five"


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
    """Catches a source file that is in no reading order: the README's or that of the kernels."""
    told = (ROOT / "README.md").read_text() + (ROOT / "csrc/cuda/fused_op_kernel.cuh").read_text()
    files = [*ROOT.glob("fused_op/*.py"), *(file for file in ROOT.glob("csrc/**/*.*"))]
    # A header is told of with the file that it declares; core_*.cu differ in their dtypes alone.
    untold = {f.name for f in files if not re.search(rf"\b{f.stem}\.(py|cpp|h|cu|cuh)\b", told)}
    assert {n for n in untold if not re.match(r"core_\w+\.cu$", n)} == {"__init__.py"}


def test_citation_has_the_version_of_the_package() -> None:
    """Catches a release that raises the version in pyproject.toml alone."""
    (version,) = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    (cited,) = re.findall(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.M)
    assert cited == version


def test_examples_page_shows_what_they_printed(tmp_path: Path) -> None:
    """Catches a recorded run that never reaches the page, or reaches it with a dead link."""
    page = tmp_path / "README.md"
    shutil.copy(ROOT / "examples/README.md", page)
    environment = json.loads(readme_table.newest().read_text())["environment"]
    results = tmp_path / "results"
    results.mkdir()
    result = {"environment": environment, "printed": {"square": "us a call 1.5"}}
    (results / "gpu.json").write_text(json.dumps(result))
    assert docs_table.write_examples(page, results)
    assert "`square`:\n\n```text\nus a call 1.5\n```" in page.read_text()
    assert not docs_table.write_examples(page, results)
