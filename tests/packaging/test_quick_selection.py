"""What `python -m pytest` leaves to --all: conftest.py says what it should be."""

import ast
import itertools
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import QUICK, covering
from tests.case import SEED

ROOT = Path(__file__).resolve().parents[2]


def test_every_value_occurs():
    """Catches an op, a pair of dtypes or a device that no case of a test would run for."""
    random.seed(SEED)
    for _ in range(50):
        factors = [range(random.randint(1, 6)) for _ in range(random.randint(1, 4))]
        cases = [set(enumerate(row)) for row in itertools.product(*factors)]
        cases = random.sample(cases, random.randint(1, len(cases)))  # tables have gaps
        chosen = covering(cases)
        assert set().union(*(cases[i] for i in chosen)) == set().union(*cases), SEED
        assert len(set(chosen)) == len(chosen) <= sum(map(len, factors)), SEED
    assert covering([set()]) == [0]  # a test without parameters


@pytest.mark.slow
def test_everything_is_one_flag_away(tmp_path):
    """Catches a flag that leaves a test out, and a selection that does not say that it is one."""
    (tmp_path / "conftest.py").write_text((ROOT / "conftest.py").read_text())
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = test_it.py\nmarkers = slow\n")
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('a', 'xyz')\n@pytest.mark.parametrize('b', 'uv')\n"
        "def test_product(a, b): pass\n"
        "def test_alone(): pass\n"
        "@pytest.mark.slow\ndef test_slow(): pass\n"
    )

    def run(*options: str) -> str:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    for options in ([], ["-n", "1"]):
        quick = run(*options)
        assert "4 passed" in quick and QUICK in quick
    for options in (["--all", "-n", "1"], ["test_it.py", "-n", "1"], ["-k", "not nothing"]):
        everything = run(*options)
        assert "8 passed" in everything and QUICK not in everything


def slow_tests() -> set[str]:
    """The tests that are marked `slow`, as file::name."""
    found = set()
    for path in [*(ROOT / "tests").rglob("test_*.py")]:
        tree = ast.parse(path.read_text())
        marks = [ast.unparse(n.value) for n in tree.body if isinstance(n, ast.Assign)]
        whole = "pytest.mark.slow" in marks
        for node in tree.body:
            if isinstance(node, ast.FunctionDef):
                own = any("mark.slow" in ast.unparse(each) for each in node.decorator_list)
                found |= {f"{path.name}::{node.name}"} if whole or own else set()
    return found


def test_every_context_has_a_test_in_it():
    """Catches a context that only --all would try: each row of docs/contexts.md names its tests."""
    slow = slow_tests()
    assert len(slow) > 10
    rows = re.findall(r"^\|.*::test_.*\|$", (ROOT / "docs/contexts.md").read_text(), re.M)
    assert len(rows) > 50
    left_out = [row for row in rows if slow.issuperset(re.findall(r"test_\w+\.py::\w+", row))]
    assert not left_out, "\n".join(left_out)
