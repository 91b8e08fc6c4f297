"""Every Python example of the documentation runs, and what it links to or names is there."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = [
    pytest.param(code, id=f"{page.name}-{i}")
    for page in PAGES
    for i, code in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S))
]


@pytest.mark.parametrize("code", EXAMPLES)
def test_example(code: str) -> None:
    """Catches a page that shows what the library no longer does: an example that raises."""
    exec(compile(code, "example", "exec"), {"__name__": "example"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
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


def test_citation_has_the_version_of_the_package() -> None:
    """Catches a release that raises the version in pyproject.toml alone."""
    (version,) = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    (cited,) = re.findall(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.M)
    assert cited == version
