"""The installed package: what it was built for, and that it takes no other torch or sources."""

import importlib.metadata
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

import fused_op
import fused_op_cuda
from fused_op._source_hash import source_hash
from tests.packaging.builds import ROOT, run_python

TORCH_MINOR = ".".join(torch.__version__.split(".")[:2])


def test_build_info_is_about_this_build():
    info = fused_op.build_info()
    pyproject = (ROOT / "pyproject.toml").read_text()
    assert f'\nversion = "{info["version"]}"\n' in pyproject
    assert info["torch"].startswith(f"{TORCH_MINOR}.")
    assert bool(info["cuda"]) == (not info["no_cuda_reason"])
    assert info["cuda"] or not info["cuda_archs"]  # none: a build without nvcc


def test_wheel_requires_the_torch_it_was_built_for():
    # Beside the module and not anywhere: the source tree may hold the metadata of another build.
    installed = [str(Path(fused_op_cuda.__file__).parent)]
    found = list(importlib.metadata.distributions(name="fused_op", path=installed))
    if Path(installed[0]) == ROOT or not found:
        pytest.skip("fused_op was not installed as a wheel")
    assert f"torch=={TORCH_MINOR}.*" in found[0].requires
    public, _, local = found[0].version.partition("+")
    assert public == fused_op.__version__
    has_cuda = bool(fused_op.build_info()["cuda"])
    assert re.fullmatch(f"({'cu[0-9]+' if has_cuda else 'cpu'}torch{TORCH_MINOR})?", local)


@pytest.mark.parametrize(
    ("before", "message"),
    [
        ("torch.__version__ = '1.2.3'", "was built for torch .*, but torch 1.2.3 is installed"),
        ("sys.modules['fused_op_cuda'] = None", "is not built"),
    ],
)
def test_import_fails_for_another_torch_or_no_module(before, message):
    result = run_python(f"import sys, torch; {before}; import fused_op")
    assert result.returncode == 1
    assert re.search(f"ImportError: fused_op {message}", result.stderr)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("in_tree", "command"),
    [(True, "python setup.py build_ext --inplace"), (False, "pip install --force-reinstall")],
)
def test_import_fails_for_a_module_of_other_sources(tree, in_tree, command):
    """Catches a change in csrc/ that is tested with the kernels of before it."""
    module = Path(fused_op_cuda.__file__)
    (tree / "elsewhere").mkdir()
    (tree / "" if in_tree else tree / "elsewhere").joinpath(module.name).symlink_to(module)
    path = os.pathsep.join(map(str, (tree, tree / "elsewhere")))

    def import_it() -> str:
        code = "import sys; sys.path.remove(''); import fused_op"
        return run_python(code, PYTHONPATH=path).stderr

    assert import_it() == ""
    with tree.joinpath("csrc", "norm.cpp").open("a") as file:
        file.write("// An edit.\n")
    assert re.search(
        rf"ImportError: .*{module.name} was not built from the .* {command}", import_it()
    )
    shutil.rmtree(tree / "csrc")  # as installed
    assert import_it() == ""


def test_source_hash_sees_every_change(tree):
    """Catches an input of the build that the comparison does not cover, and noise that it does."""
    hashes = [source_hash(tree)]
    assert hashes == [source_hash(ROOT)]

    def changes() -> bool:
        hashes.append(source_hash(tree))
        return hashes[-1] not in hashes[:-1]

    sources = [path for path in tree.joinpath("csrc").rglob("*") if path.is_file()]
    for path in [tree / "setup.py", *sources]:
        path.write_bytes(path.read_bytes() + b"\n")
        assert changes(), path
    sources[0].rename(sources[0].with_stem("renamed"))
    assert changes()
    tree.joinpath("csrc", "core", "new.h").touch()
    assert changes()
    tree.joinpath("csrc", "core", "new.h~").touch()  # of an editor
    tree.joinpath("csrc", "core", "new.o").touch()
    tree.joinpath("csrc", "core", ".#new.h").symlink_to("user@host.1:2")  # Emacs, while one edits
    assert not changes()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_brings_no_second_openmp_runtime():
    """Two runtimes keep two pools of threads, which compete for the cores."""
    result = run_python(
        "import torch\n"
        "def runtimes(): return {line.split()[-1] for line in open('/proc/self/maps')"
        " if 'libgomp' in line or 'libomp' in line or 'libiomp' in line}\n"
        "before = runtimes()\n"
        "import fused_op\n"
        "fused_op.layer_norm(torch.ones(1000, 100), (100,))\n"
        "assert runtimes() == before, (before, runtimes())"
    )
    assert result.returncode == 0, result.stderr
