"""Which tests run: a quick selection unless --all, a path, -k or -m says otherwise.

The selection takes every test function that is not marked `slow`. Of a function with parameters it
takes so many cases that each value of each parameter (each op, pair of dtypes, device, ...) occurs
in one of them. What it leaves to --all are the other combinations, and what is marked `slow`.

In the root, as pytest reads the options of a conftest.py only where its run begins.

Each process of pytest-xdist gets its share of the cores. With as many threads as cores in every
process, the threads wait for one another at each barrier. A test that is about threads sets their
number by itself (`threads` in tests/conftest.py).

Python's garbage collector passes over what was there before a file of tests. Thousands of tests and
the packages that they import are millions of objects, which take seconds at each full collection.
"""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Hashable, Iterable, Sequence

import pytest

if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
    # Read when torch is imported, here and in the scripts that tests start.
    share = max(1, len(os.sched_getaffinity(0)) // workers)
    os.environ.setdefault("OMP_NUM_THREADS", str(share))

# For all processes of a run: a test has the same numbers in each.
os.environ.setdefault("FUSED_OP_SEED", str(random.SystemRandom().randrange(2**31)))

QUICK = "This was the quick selection. Everything: python -m pytest --all"


def pytest_addoption(parser: pytest.Parser) -> None:
    help = "every test, not the quick selection; so does a path, -k or -m"
    parser.addoption("--all", action="store_true", dest="all_tests", help=help)


@pytest.hookimpl(tryfirst=True)  # the processes of pytest-xdist get the options as they are then
def pytest_configure(config: pytest.Config) -> None:
    option = config.option
    named = config.args_source is config.ArgsSource.ARGS
    option.all_tests |= bool(named or option.keyword or option.markexpr)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.all_tests:
        return
    quick = set(quick_selection(items))
    config.hook.pytest_deselected(items=[item for item in items if item not in quick])
    items[:] = [item for item in items if item in quick]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if terminalreporter.stats.get("failed"):
        terminalreporter.write_line(
            f"The same numbers again: FUSED_OP_SEED={os.environ['FUSED_OP_SEED']}"
        )
    if not terminalreporter.config.option.all_tests:
        terminalreporter.write_line(QUICK)


def pytest_collection_finish() -> None:
    pass_over_what_is_there()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is not None and nextitem.path != item.path:
        pass_over_what_is_there()


def pass_over_what_is_there() -> None:
    gc.collect()
    gc.freeze()


def quick_selection(items: Iterable[pytest.Item]) -> Iterable[pytest.Item]:
    """Those that run without --all."""
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        if not item.get_closest_marker("slow"):
            functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in functions.values():
        yield from (cases[i] for i in covering([parameters(case) for case in cases]))


def parameters(item: pytest.Item) -> set[Hashable]:
    """The name and the value of each parameter of a test; empty for a test without any.

    A value is known by its id: not all can be hashed, and all cases share those of one list.
    """
    callspec = getattr(item, "callspec", None)
    return {(name, id(value)) for name, value in callspec.params.items()} if callspec else set()


def covering(cases: Sequence[set[Hashable]]) -> list[int]:
    """The cases, by number, that together hold every value; greedy, and the same in every run."""
    left = dict(enumerate(cases))
    missing = set().union(*cases)
    chosen = [0]  # also of a test without parameters
    missing -= left.pop(0)
    while missing:
        best = max(left, key=lambda i: len(left[i] & missing))
        missing -= left.pop(best)
        chosen.append(best)
    return chosen
