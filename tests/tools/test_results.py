"""The committed results of the benchmarks, and where they say they come from."""

import json
import shlex
import sys

import pytest

from benchmarks import report

RESULTS = sorted(report.RESULTS.rglob("*.json"))


def test_a_command_names_no_folder_of_an_interpreter(monkeypatch) -> None:
    """Catches a result that tells of the machine's folders, and a lost argument."""
    monkeypatch.setattr(sys, "orig_argv", ["/a/b/python3", "-m", "benchmarks.cpu", "--json", "a b"])
    assert report.own_command() == "python3 -m benchmarks.cpu --json 'a b'"


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: str(path.relative_to(report.RESULTS)))
def test_a_result_says_where_it_comes_from(path) -> None:
    """Catches figures that nobody can repeat: without device, versions, commit or command."""
    environment = json.loads(path.read_text())["environment"]
    assert environment["device"] and environment["torch"] and environment["date"]
    assert len(environment["commit"]) == 40
    words = shlex.split(environment["command"])
    assert words and not any(word.startswith("/") for word in words)
    if environment["device_type"] == "cuda":
        assert environment["driver"] and environment["cuda"]
