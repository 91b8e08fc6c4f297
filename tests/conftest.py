"""Fixtures: a test that takes `op`, `pair` or `device` runs for each of them."""

import zlib

import pytest
import torch

import fused_op_cuda
from tests.case import SEED, make_case
from tests.memory import need_memory as need_memory  # a fixture
from tests.ops import DEVICES, OPS, PAIRS


def pytest_report_header() -> str:
    gpu = torch.cuda.get_device_name() if "cuda" in DEVICES else "none"
    return f"torch {torch.__version__}, GPU: {gpu}, FUSED_OP_SEED={SEED}"


@pytest.fixture(autouse=True)
def numbers_of_this_test(request):
    """What a test draws from torch's own generator depends on its name and FUSED_OP_SEED alone."""
    torch.manual_seed(SEED ^ zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(params=OPS, ids=str)
def op(request):
    return request.param


@pytest.fixture(params=PAIRS, ids=str)
def pair(request):
    return request.param


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture
def in_python():
    """Calls are recorded by the Function of functional.py, not by the node in C++."""
    fused_op_cuda.record_in_cpp(False)
    yield
    fused_op_cuda.record_in_cpp(True)


@pytest.fixture(params=["node", "function"])
def recorder(request):
    """Who records calls for autograd: the node in C++, and the Function in Python."""
    fused_op_cuda.record_in_cpp(request.param == "node")
    yield request.param
    fused_op_cuda.record_in_cpp(True)


@pytest.fixture
def threads():
    """torch.set_num_threads, undone after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def still_works(device):
    """After the test, good calls on the same device are right: nothing that it did lives on."""
    yield
    for op in OPS:
        case = make_case(op, (3, 33), PAIRS[0], device)
        case.check(case.run())
    if device == "cuda":
        torch.cuda.synchronize()
