"""Kernels that are compiled when they are first called, on a GPU.

Catches a first call that fails where a later one works (inside the capture of a graph, in several
threads at once, compiled, on another device, with a cache that cannot be written), a kernel from
the cache that is another one, and rows whose bits depend on what else was called.
"""

import os
import subprocess
import sys
import textwrap

import pytest

from tests.ops import DEVICES

pytestmark = pytest.mark.skipif("cuda" not in DEVICES, reason="needs a GPU")

# A width that fills no tile of the core table, and one that is no whole number of vectors.
PRELUDE = """
import sys, threading, torch, fused_op
torch.manual_seed(0)
x = torch.randn(300, 1160, device="cuda").bfloat16()
w, b = torch.randn(2, 1160, device="cuda").bfloat16()

def call():
    y = fused_op.fused_layer_norm(x, w, b)
    z = fused_op.fused_rms_norm(x, w, 1e-6, out_dtype=torch.float32)
    return y, z

def check(y, z):
    torch.testing.assert_close(y, torch.nn.functional.layer_norm(x, (1160,), w, b))
    right = torch.nn.functional.rms_norm(x.float(), (1160,), w.float(), 1e-6)
    torch.testing.assert_close(z, right, rtol=1e-5, atol=1e-5)
"""
PROGRAMS = {
    "plain": "check(*call())",
    "capture": """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = call()
        graph.replay()
        check(*results)
    """,
    "threads": """
        found = []
        threads = [threading.Thread(target=lambda: found.append(call())) for _ in range(8)]
        [t.start() for t in threads], [t.join() for t in threads]
        assert len(found) == 8
        for results in found:
            check(*results)
            assert all(map(torch.equal, results, found[0]))
    """,
    "another stream": """
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            results = call()
        stream.synchronize()
        check(*results)
    """,
    "compiled": "check(*torch.compile(call, fullgraph=True)())",
    "every device": """
        for device in range(torch.cuda.device_count()):
            x, w, b = (t.to(device) for t in (x, w, b))
            check(*call())
    """,
}


def run(program, **environment):
    code = PRELUDE + textwrap.dedent(program)
    command = [sys.executable, "-c", code]
    env = {**os.environ, **environment}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("name", PROGRAMS)
def test_first_call(name, tmp_path):
    run(PROGRAMS[name], FUSED_OP_CACHE_DIR=str(tmp_path / "cache"), FUSED_OP_JIT="require")


def test_cache_gives_the_same_bits(tmp_path):
    cache = tmp_path / "cache"
    program = """
        import hashlib
        bits = [t.contiguous().view(torch.uint8).cpu().numpy().tobytes() for t in call()]
        print(hashlib.sha256(b"".join(bits)).hexdigest())
    """
    options = {"FUSED_OP_CACHE_DIR": str(cache), "FUSED_OP_JIT": "require"}
    first = run(program, **options)
    kernels = sorted(cache.glob("*.kernel"))
    assert kernels
    written = [path.stat().st_mtime_ns for path in kernels]
    assert run(program, **options) == first
    assert [path.stat().st_mtime_ns for path in sorted(cache.glob("*.kernel"))] == written


def test_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    run("check(*call())", FUSED_OP_CACHE_DIR=str(tmp_path / "file"), FUSED_OP_JIT="require")


def test_without_a_compiler(tmp_path):
    """What is not in the core table is still computed, after one warning; what is, without one."""
    program = """
        import warnings
        warnings.simplefilter("error")
        leaf = x[:, :1024].contiguous().requires_grad_()
        fused_op.fused_layer_norm(leaf, w[:1024], b[:1024]).sum().backward()
        warnings.simplefilter("always")
        with warnings.catch_warnings(record=True) as caught:
            check(*call())
            check(*call())
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                results = call()
            graph.replay()
            check(*results)
        told = [str(w.message) for w in caught if "kernel is not available" in str(w.message)]
        assert len(told) == 1 and "FUSED_OP_JIT is 0" in told[0], told
    """
    run(program, FUSED_OP_CACHE_DIR=str(tmp_path), FUSED_OP_JIT="0")
    assert not list(tmp_path.glob("*.kernel"))


def test_many_widths(tmp_path):
    """Catches a process that compiles for every width for ever, and kernels of any width that give
    other bits than those of one."""
    some = """
        import hashlib
        bits = hashlib.sha256()
        for cols in (72, 301, 1160, 2050, 5000):
            for dtype in (torch.bfloat16, torch.float32):
                g = torch.Generator("cuda").manual_seed(cols)
                x, dy = torch.randn(2, 700, cols, device="cuda", generator=g).to(dtype)
                leaves = [x, *torch.randn(2, cols, device="cuda", generator=g).to(dtype)]
                y = fused_op.fused_layer_norm(*[t.requires_grad_() for t in leaves])
                for result in y, *torch.autograd.grad(y, leaves, dy):
                    found = result.detach().contiguous().view(torch.uint8)
                    bits.update(found.cpu().numpy().tobytes())
        print(bits.hexdigest())
    """
    many = """
        for cols in range(1025, 1085):
            fused_op.fused_rms_norm(torch.ones(3, cols, device="cuda"))
    """
    caches = [tmp_path / name for name in ("few", "many")]
    programs = [some, textwrap.dedent(many) + textwrap.dedent(some)]
    few, after_many = (
        run(
            program,
            FUSED_OP_CACHE_DIR=str(cache),
            FUSED_OP_JIT="require",
            FUSED_OP_MAX_KERNELS="40",
        )
        for program, cache in zip(programs, caches, strict=True)
    )
    assert after_many == few
    assert 40 <= len(list(caches[1].glob("*.kernel"))) < 90
