"""``override_torch`` as a switch of the process: handles, reports, threads, the command line."""

import subprocess
import sys
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F

import fused_op
from tests.contexts.override import arguments, results

pytestmark = [
    pytest.mark.filterwarnings("error:fused_op"),
    pytest.mark.usefixtures("override_ends"),
]


def test_handles_nest_in_any_order() -> None:
    """Catches an inner undo that ends the outer one, and one that leaves the switch on."""
    x = torch.randn(4, 8)
    first = fused_op.override_torch()
    second = fused_op.override_torch(compiled=False)
    first.undo()
    first.undo()
    F.layer_norm(x, (8,))
    assert (first.report().ours, second.report().ours) == ({}, {"native_layer_norm": 1})
    second.undo()
    F.layer_norm(x, (8,))
    assert second.report().ours == {"native_layer_norm": 1}
    with pytest.raises(RuntimeError, match="mine"), fused_op.override_torch() as third:
        raise RuntimeError("mine")
    F.layer_norm(x, (8,))
    assert third.report().ours == {} and "no norm was called" in str(third.report())


def test_what_no_kernel_takes_is_said_once_and_counted() -> None:
    """Catches a fallback without a word, and a word at every call."""
    x = torch.randn(4, 8)
    infinite = float("inf")
    with fused_op.override_torch() as override:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                torch.testing.assert_close(F.layer_norm(x, (8,), eps=infinite), torch.zeros(4, 8))
        with fused_op.disabled():
            F.layer_norm(x, (8,))
    assert len(caught) <= 1  # none, where an earlier test has had it
    assert override.report().torchs == {
        "native_layer_norm: an eps that is not finite": 3,
        "native_layer_norm: inside fused_op.disabled()": 1,
    }
    assert "PyTorch kept 3 calls" in str(override.report())
    assert override.report().ours == {}


def test_threads() -> None:
    """Catches calls of several threads that disturb each other, or go uncounted."""
    tensors = [arguments("layer_norm") for _ in range(4)]
    alone = [results("layer_norm", each) for each in tensors]
    wrong = []

    def train(i: int) -> None:
        for _ in range(50):
            found = results("layer_norm", tensors[i])
            if any((a - b).abs().max() > 1e-4 for a, b in zip(found, alone[i], strict=True)):
                wrong.append(i)

    with fused_op.override_torch() as override:
        threads = [threading.Thread(target=train, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
    assert override.report().ours["native_layer_norm_backward"] == 200


def test_wrong_argument() -> None:
    with pytest.raises(
        TypeError, match="override_torch: argument 'compiled' must be bool, not int"
    ):
        fused_op.override_torch(compiled=1)


SCRIPT = """
import sys, helper_beside_the_script, torch
assert __name__ == "__main__" and sys.argv[1:] == ["--steps", "2"], sys.argv
torch.nn.LayerNorm(8)(torch.randn(2, 8))
sys.exit(3)
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_module", [False, True])
def test_run(tmp_path, is_module: bool) -> None:
    """Catches a program that sees other arguments, another path or another exit than without."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "helper_beside_the_script.py").write_text("")
    (folder / "program.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "fused_op", "run"]
    command += ["-m", "program"] if is_module else [str(folder / "program.py")]
    run = subprocess.run(
        [*command, "--steps", "2"],
        cwd=folder if is_module else None,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 3, run.stderr
    assert run.stdout == ""
    assert run.stderr == "fused_op took 1 calls of aten::native_layer_norm\n"


THREADS = """
import threading, time, torch

def norm():
    time.sleep(1)
    torch.nn.functional.layer_norm(torch.randn(2, 8), (8,))

threading.Thread(target=norm).start()
"""


@pytest.mark.slow
def test_run_awaits_the_program_s_threads(tmp_path) -> None:
    """Catches an override that ends before the program does."""
    (tmp_path / "program.py").write_text(THREADS)
    command = [sys.executable, "-m", "fused_op", "run", str(tmp_path / "program.py")]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert run.stderr == "fused_op took 1 calls of aten::native_layer_norm\n"


POOL = """
import torch
from pool import pool

print(pool.submit(torch.nn.functional.layer_norm, torch.randn(2, 8), (8,)).result().shape[0])
"""


@pytest.mark.slow
def test_run_of_a_link_whose_pool_stays_open(tmp_path) -> None:
    """Catches a wait for idle threads of a pool, which Python ends; and a path of the link."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "program.py").write_text(POOL)
    pool = "from concurrent.futures import ThreadPoolExecutor\npool = ThreadPoolExecutor(1)"
    (tmp_path / "code" / "pool.py").write_text(pool)
    (tmp_path / "link.py").symlink_to(tmp_path / "code" / "program.py")
    command = [sys.executable, "-m", "fused_op", "run", str(tmp_path / "link.py")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stdout) == (0, "2\n"), run.stderr
    assert run.stderr == "fused_op took 1 calls of aten::native_layer_norm\n"


def test_every_device_is_overridden() -> None:
    """Catches a build for CUDA that leaves the GPU to PyTorch: no CPU call would show it."""
    with fused_op.override_torch() as override:
        dumps = [torch._C._dispatch_dump(f"aten::{op}") for op in override.report().ops]
    devices = 2 if fused_op.build_info()["cuda"] else 1
    assert all(dump.count("torch_override.cpp") == devices for dump in dumps), dumps
