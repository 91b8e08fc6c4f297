"""`python -m fused_op plan` and `compile`: what they say is so, and what they write is found.

Without a GPU, as both commands are meant to be used. Catches a report of another kernel than the
one that is launched, numbers that the compiler did not say, and a kernel that was compiled
beforehand in vain.
"""

import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fused_op
import fused_op_cuda
from fused_op import _kernel_plan as kernel_plan
from fused_op.__main__ import main
from fused_op._machine_code import facts_of
from tests.children import ROOT, run_children
from tests.kernels.toy_kernel import HEADERS, KERNEL, needs_nvrtc, nvrtc_version

HAS_CORE_TABLE = bool(fused_op.build_info()["cuda_archs"])
needs_core_table = pytest.mark.skipif(not HAS_CORE_TABLE, reason="a build without nvcc")
PLAN = "plan --rows 4096 --arch 9.0 --sms 132 --op"
# No kernel of the core table, but for that of the partial sums.
NEEDS_KERNELS = {
    f"{PLAN} layer_norm --cols 1152 --dtype bf16": 1,
    f"{PLAN} layer_norm --cols 768 --dtype bf16 --out-dtype f32": 1,
    f"{PLAN} rms_norm --cols 1000 --dtype f16 --rounding before_weight": 1,
    f"{PLAN} rms_norm --cols 768 --dtype f32 --dropout": 1,
    f"{PLAN} rms_norm --cols 1023 --dtype f16 --residual": 1,
    f"{PLAN} layer_norm --cols 1152 --dtype bf16 --residual f32 --backward": 2,
    f"{PLAN} layer_norm --cols 768 --dtype bf16 --memory-efficient --backward": 2,
}


@pytest.fixture(autouse=True)
def no_gpu(cache, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def run(command: str, capsys, status: int = 0) -> str:
    assert main(command.split()) == status
    return capsys.readouterr().out


def in_process(*commands: str, first: Path = ROOT, **environment: str) -> str:
    """The output of commands, with what is imported from a folder first."""
    code = "from fused_op.__main__ import main\n"
    code += f"assert not any([main(command.split()) for command in {commands}])"
    (done,) = run_children(code, [environment], first)
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_core_table
@pytest.mark.parametrize(
    "call",
    [
        "layer_norm --cols 768 --dtype bf16",
        "rms_norm --cols 4096 --dtype f16 --param-dtype f32 --residual",
        "layer_norm --cols 1024 --dtype f32 --backward",
        "rms_norm --cols 64 --dtype bf16 --param-dtype f32 --backward",
        "rms_norm --cols 4096 --dtype bf16 --residual --rounding before_weight",
        "rms_norm --cols 1024 --dtype bf16 --rounding before_weight --backward",
    ],
)
def test_kernels_of_the_extension(call):
    """Catches a common call that needs a compiler."""
    output = in_process(f"{PLAN} {call}", FUSED_OP_JIT="0")
    kernels = 2 if "backward" in call else 1
    assert output.count("\nkernel  ") == kernels and "PyTorch's operations" not in output
    assert output.count("\ncode    compiled with the extension\n") == kernels
    assert re.search(r"^        core +1$", output, re.MULTILINE)
    assert re.search(r"^        width +0$", output, re.MULTILINE)


@needs_nvrtc
def test_long_rows(capsys):
    """Catches a plan of long rows without a kernel that its launch may take."""
    output = run(f"{PLAN} layer_norm --cols 100000 --dtype f32", capsys)
    form = "in_turn" if kernel_plan.gpu_of(None, None).fast_memory else "cluster"
    assert re.findall(r"::(\w+)_kernel<", output) == [f"forward_{form}"]
    output = run(f"{PLAN} layer_norm --cols 100000 --dtype f32 --backward", capsys)
    names = ["backward_cluster", "backward_row_sums", "backward_columns", "add_partials"]
    assert re.findall(r"::(\w+)_kernel<", output) == names
    assert output.count("\ntakes   ") == len(names)


@needs_nvrtc
@pytest.mark.parametrize("command", NEEDS_KERNELS)
def test_plan(command, capsys, cache):
    output = run(command, capsys)
    assert "GPU     132 SMs of 9.0, 232448 bytes of shared memory (there is none here)" in output
    names = re.findall(r"^kernel  (.+)$", output, re.MULTILINE)
    sources = re.findall(r"^source  (.+)$", output, re.MULTILINE)
    taken = re.findall(r"^takes   (\d+) registers", output, re.MULTILINE)
    assert len(names) == len(sources) == len(taken) == NEEDS_KERNELS[command]
    integers = dict(re.findall(r"^(?:plan   |       ) (\w+) +(\d+)$", output, re.MULTILINE))
    assert integers["width"] == re.search(r"--cols (\d+)", command)[1]
    assert f"Tile<{integers['pack']}, {integers['lanes']}, {integers['vectors']}, " in names[0]
    for source, name, registers in zip(sources, names, taken, strict=True):
        _, _, log = fused_op_cuda._compile(source, name, 90)
        assert f"Used {registers} registers" in log
    extension = output.count("compiled with the extension; by NVRTC it\n")
    assert extension == HAS_CORE_TABLE * names.count(
        "fused_op::cuda::add_partials_kernel<fused_op::BFloat16, float>"
    )
    assert output.count("compiled now") == len(names) - extension
    assert len(list(cache.glob("*.kernel"))) == len(names)
    again = run(command, capsys)
    assert again.count("from the cache") == len(names) - extension and "compiled now" not in again


@needs_nvrtc
@pytest.mark.parametrize(("fast_memory", "form"), [(True, "in_turn"), (False, "cluster")])
def test_memory_decides_about_long_rows(fast_memory, form):
    """Catches long rows in turn on a GPU such as an H100, which is faster without."""
    gpu = kernel_plan.Gpu(132, 90, 232448, fast_memory)
    for rows in (300, 4096):
        call = kernel_plan.Call("layer_norm", rows, 32768, "bf16")
        _, ((header, _, _),) = call.kernels(gpu)
        assert header == f"cuda/forward_{form}.cuh"


@needs_nvrtc
def test_which_narrow_rows_are_one_span():
    """Catches narrow rows that leave the kernel for rows in one span, or those that stay in it."""
    gpu = kernel_plan.Gpu(132, 90, 232448, True)
    for dtype, size in (("bf16", 2), ("f32", 4)):
        for cols in range(1, 65):
            call = kernel_plan.Call("layer_norm", 1 << 20, cols, dtype)
            _, ((header, _, _),) = call.kernels(gpu)
            vectors, rest = divmod(cols * size, 16)
            in_table = not rest and vectors in (4, 8, 16)
            by_vectors = cols <= 48 and not in_table and vectors != 6
            is_flat = rest > 0 or by_vectors
            assert header == f"cuda/forward_{'flat' if is_flat else 'rows'}.cuh", (dtype, cols)


@needs_nvrtc
def test_no_code(capsys):
    """Where nothing can be compiled, the report says why, and what takes the call."""
    output = in_process(next(iter(NEEDS_KERNELS)), FUSED_OP_JIT="0")
    assert "\ncode    none: FUSED_OP_JIT is 0, and the package does not have the kernel" in output
    last = "PyTorch's operations take the call, after a warning; FUSED_OP_JIT=require: an error\n"
    assert output.endswith(last)
    output = run(next(iter(NEEDS_KERNELS)).replace("9.0", "1.3"), capsys)
    assert re.search("code    none: NVRTC .* has no target for compute capability 1.3", output)


@needs_nvrtc
@pytest.mark.parametrize("arch", [75, 80, 90, 120])
@pytest.mark.parametrize("kernel", ["spills", "toy"])
def test_facts_are_the_compilers(kernel, arch):
    """Catches a form of cubin that is read wrongly."""
    if arch == 120 and nvrtc_version() < (12, 8):
        pytest.skip("it makes no cubin of that architecture")
    header, name, _ = KERNEL
    headers = HEADERS
    if kernel == "spills":
        header, name = "spills.cuh", "spills"
        text = (
            "__global__ void __launch_bounds__(1024) spills(float* x) {"
            "  __shared__ float y[777]; float z[200]; y[threadIdx.x % 777] = x[0];"
            "  for (int i = 0; i < 200; ++i) z[i] = x[i * 1024 + threadIdx.x];"
            "  __syncthreads();"
            "  for (int i = 0; i < 200; ++i) x[i] = z[i] * z[199 - i] + y[i];"
            "}"
        )
        headers = {header: text}
    # Of a source that it has seen before, NVRTC says nothing.
    headers = headers | {header: headers[header] + f"// {time.time_ns()}\n"}
    symbol, code, log = fused_op_cuda._compile(header, name, arch, headers)
    facts = facts_of(symbol, code)
    assert facts.registers == int(re.search(r"Used (\d+) registers", log)[1])
    assert facts.stack_bytes == int(re.search(r"(\d+) bytes stack frame", log)[1])
    assert (facts.stack_bytes > 0) is (kernel == "spills")
    assert facts.shared_bytes in ([777 * 4, 777 * 4 + 1024] if kernel == "spills" else [0, 1024])


@needs_nvrtc
def test_nothing_is_known_of_ptx(capsys):
    output = run(next(iter(NEEDS_KERNELS)).replace("9.0", "99.0"), capsys)
    assert "takes   not known: the driver compiles this PTX further" in output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--cols 0 --dtype f32", "rows and columns count from 1"),
        ("--cols 8 --dtype f64 --param-dtype f32", "beside f64, residual and parameters are of"),
        ("--cols 8 --dtype f16 --residual bf16", "beside f16, residual and parameters are of"),
        ("--cols 8 --dtype bf16 --out-dtype f16", "the output of bf16 cannot be f16"),
        ("--cols 8 --dtype f32 --memory-efficient --dropout", "goes with neither"),
    ],
)
def test_calls_that_no_op_takes(options, message, capsys):
    assert message in run(f"{PLAN} layer_norm {options}", capsys, status=1)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (f"{PLAN} layer_norm --cols 8 --dtype f8", "invalid choice: 'f8'"),
        ("plan --op rms_norm --rows 1 --cols 8 --dtype f32 --arch 9", "is like 9.0, not '9'"),
        ("compile --cols 144,x --dtype f32", "widths are like 144,1152, not '144,x'"),
        ("compile --cols 144 --dtype f32,int", "'int' is none of f16, bf16, f32, f64"),
        ("compile --cols 144 --dtype f32 --op norm", "'norm' is none of layer_norm, rms_norm"),
    ],
)
def test_mistakes_on_the_command_line(command, message, capsys):
    with pytest.raises(SystemExit):
        main(command.split())
    assert message in capsys.readouterr().err


@pytest.mark.skipif(bool(fused_op.build_info()["cuda"]), reason="a build with CUDA")
@pytest.mark.parametrize("command", [f"{PLAN} layer_norm --cols 8", "compile --cols 8"])
def test_a_build_without_cuda_says_so(command, capsys):
    output = run(f"{command} --dtype f32", capsys, status=1)
    assert output.startswith("This build has no CUDA backend, and compiles no kernels: ")


def test_a_plan_is_for_the_gpu_that_is_there(monkeypatch):
    """Catches a plan for an H200 on another GPU, and its memory where another GPU is named."""
    properties = SimpleNamespace(
        multi_processor_count=78, major=8, minor=6, shared_memory_per_block_optin=99 << 10
    )
    assert kernel_plan.gpu_of(None, None) == (132, 90, 227 << 10, True)
    assert kernel_plan.gpu_of(7, 75) == (7, 75, 64 << 10, True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(fused_op_cuda, "_has_fast_memory", lambda device: False, raising=False)
    assert kernel_plan.gpu_of(None, None) == (78, 86, 99 << 10, False)
    assert kernel_plan.gpu_of(10, 80) == (10, 80, 163 << 10, True)


@pytest.mark.slow
@needs_nvrtc
def test_compiled_beforehand(tmp_path, capsys, cache):
    """A kernel of the folder is found where that is the package's, without compiler and cache."""
    installed = tmp_path / "site-packages"
    folder = installed / "fused_op" / "_kernels"
    arguments = "--arch 9.0 --cols 144,1152 --dtype bf16 --op layer_norm,add_rms_norm"
    output = run(f"compile {arguments} --out-dtype f32 --folder {folder}", capsys)
    first, *lines, last = output.splitlines()
    assert first.endswith(f"into {folder}")
    own = [
        line
        for line in lines
        if line.endswith(": add_partials_kernel is compiled with the extension")
    ]
    assert len(own) == HAS_CORE_TABLE
    lines = [line for line in lines if line not in own]
    assert last == f"{len(lines)} kernels" and len(lines) == len(list(folder.iterdir()))
    assert len(set(lines)) == len(lines)
    for kernel, count in ("forward_kernel", 8), ("backward_few_kernel", 4), ("backward_kernel", 6):
        assert sum(line.endswith(f": {kernel}") for line in lines) == count, kernel
    assert not cache.exists()

    module = Path(fused_op_cuda.__file__)
    (installed / module.name).symlink_to(module)
    commands = [
        f"plan --rows {rows} --cols {cols} --dtype bf16 --out-dtype f32 --arch 9.0 --op {options}"
        for rows in (1, 300, 3000, 40_000, 300_000)  # some of each way to take them
        for cols in (144, 1152)
        for op in ("layer_norm", "rms_norm --residual bf16")
        for options in (op, f"{op} --backward")
    ]
    found = in_process(*commands, first=installed, FUSED_OP_JIT="0")
    counts = [
        found.count(f"\n{line}")
        for line in ("kernel  ", "code    installed with", "code    compiled with the extension")
    ]
    assert counts[0] == counts[1] + counts[2], found
    assert counts[1] == (len(commands) if HAS_CORE_TABLE else counts[0]), found


@needs_core_table
@needs_nvrtc
def test_what_the_extension_has_is_not_compiled(capsys, tmp_path):
    output = run(f"compile --cols 1024 --dtype bf16 --op rms_norm --folder {tmp_path}", capsys)
    extension = re.findall(r": (\w+) is compiled with the extension\n", output)
    assert sorted(extension) == [
        *["add_partials_kernel", "backward_kernel", "backward_kernel"],
        *["forward_kernel", "forward_kernel"],
    ]
    # But for few rows in backward.
    assert re.findall(r" s .*: (\w+)\n", output) == ["backward_few_kernel"]
    assert output.endswith("\n1 kernels\n") and len(list(tmp_path.glob("*.kernel"))) == 1


@needs_nvrtc
def test_a_folder_that_cannot_be_written_to(capsys, tmp_path):
    (tmp_path / "file").touch()
    command = f"compile --cols 144 --dtype bf16 --op rms_norm --folder {tmp_path / 'file'}"
    output = run(command, capsys, status=1)
    assert re.search(r"FAILED  rms_norm forward, 1 x 144 bf16: .*/file cannot be opened", output)
