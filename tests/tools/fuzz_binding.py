"""Throws random objects and tensors at the compiled module and at the public functions.

    python -m tests.tools.fuzz_binding --seconds 300 --seed 1 [--device cuda]

Whatever they get, they answer or raise an exception. A process of its own makes the calls and keeps
the one that it is about to make in a file: if a signal ends it, that call and the seed are printed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import subprocess
import sys
import tempfile
import time
import warnings

import torch
from torch._subclasses import FakeTensorMode
from torch.nn import UninitializedParameter
from torch.testing._internal.two_tensor import TwoTensor

import fused_op
import fused_op_cuda
from fused_op._options import BackwardOptions, Options

LENGTH = 1 << 16  # bytes that a call is described in


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--calls", type=int, default=0, help="that many, however long they take")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--last-call", help=argparse.SUPPRESS)  # of the inner process: the file
    options = parser.parse_args(argv)
    if options.last_call is not None:
        fuzz(options.seconds, options.calls, options.seed, options.device, options.last_call)
        return
    with tempfile.TemporaryDirectory() as folder:
        last_call = os.path.join(folder, "call")
        command = [sys.executable, "-m", "tests.tools.fuzz_binding", "--last-call", last_call]
        for name in ("seconds", "calls", "seed", "device"):
            command += [f"--{name}", str(getattr(options, name))]
        status = subprocess.run(command, check=False).returncode
        if status != 0:
            with open(last_call, "rb") as file:
                call = file.read().rstrip(b"\0").decode()
            sys.exit(f"seed {options.seed}: status {status} in this call or soon after:\n{call}")


def fuzz(seconds: float, calls: int, seed: int, device: str, last_call: str) -> None:
    """Makes `calls` calls, or, for 0, calls until the time is over; prints how many there were, and
    how many got an answer."""
    random.seed(seed)
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    pool = Pool(device)
    makers = [
        norm,
        norm_forward,
        norm_backward,
        norm_backward_into,
        dropout_state,
        public,
        anything,
    ]
    made = answered = 0
    end = time.monotonic() + seconds
    with open(last_call, "wb", buffering=0) as file:
        while made < calls if calls else time.monotonic() < end:
            function, args, kwargs = random.choice(makers)(pool)
            text = f"call {made}: {function.__name__}{describe(args)} {describe(kwargs)}"
            os.pwrite(file.fileno(), text.encode()[:LENGTH].ljust(LENGTH, b"\0"), 0)
            made += 1
            with contextlib.suppress(Exception):
                function(*args, **kwargs)
                answered += 1
            if device == "cuda" and made % 64 == 0:
                torch.cuda.synchronize()  # an illegal access shows here
    print(f"{made} calls, {answered} answers")


def describe(value) -> str:
    """A call in words; repr() of a tensor reads it, which some cannot bear."""
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(describe, value))})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{k}={describe(v)}' for k, v in value.items())}}}"
    if not isinstance(value, torch.Tensor) or isinstance(value, UninitializedParameter):
        return type(value).__name__ if isinstance(value, torch.Tensor) else repr(value)[:200]
    strides = value.stride() if is_dense(value) else ""
    shape = "nested" if value.is_nested else tuple(value.shape)
    return f"<{type(value).__name__} {value.dtype} {shape} {strides} {value.layout} {value.device}>"


def is_dense(value) -> bool:
    plain = isinstance(value, torch.Tensor) and not isinstance(value, UninitializedParameter)
    return plain and value.layout is torch.strided and not value.is_nested


class Pool:
    """Tensors of every kind, and objects that are none."""

    def __init__(self, device: str) -> None:
        x = torch.randn(3, 8, device=device)
        freed = torch.randn(3, 8, device=device).as_subclass(Odd)
        freed.untyped_storage().resize_(0)
        with FakeTensorMode():
            fake = torch.randn(3, 8, device=device)
        self.x, self.freed, self.fake = x, freed, fake
        self.tensors = [
            *(x, x.double(), x.half(), x.bfloat16(), x.long(), x.to_sparse(), x.to("meta")),
            *(x[:, ::2], x.t(), x[1:, 1:], x[:0], x[:, :0], x[0], x[0, 0], x[0][::2]),
            *(x[:1].expand(3, 8), x[:, :1].expand(3, 8), torch._neg_view(x), x.cfloat().imag),
            *(x.as_strided((3, 8), (4, 1)), x.cpu(), x.clone().requires_grad_(), freed, fake),
            *(TwoTensor(x, x), UninitializedParameter(device=device), x.bool()),
            *(
                x.as_subclass(Odd),
                x.to(torch.float8_e4m3fn),
                x.to_sparse_csr(),
                x.cpu().to_mkldnn(),
            ),
            torch.nested.nested_tensor([x, x]),
            torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
            torch.ones(2, 3, device=device),
            torch.ones(1, 3, device=device),
            torch.ones(2, 3, device=device, dtype=torch.float64),
            torch.randn(1 << 10, 1 << 8, device=device),  # long enough to release the interpreter
        ]
        if device == "cpu":
            raw = bytearray(99)
            self.tensors.append(torch.frombuffer(raw, dtype=torch.float32, offset=2, count=24))
            self.tensors[-1] = self.tensors[-1].view(3, 8)
        self.stats = torch.ones(2, 3, device=device)
        self.objects = [
            *(None, 0, 1, -1, 2**31, 2**62, 2**63, -(2**63), 2**64, 10**400, 0.0, 1.5, True, False),
            *(float("nan"), float("inf"), -0.0, 1e-300, 1j, "", "layer_norm", "rms_norm", "é\0x"),
            *(b"x", [], (), {}, [x], [None] * 9, object(), object, len, Odd, Odd.__new__),
            *(torch.float32, torch.float64, torch.float16, torch.int8, torch.device("cpu")),
            *(torch.strided, torch.Size([8]), (True,) * 4, [True] * 5, range(4), iter([True] * 4)),
        ]

    def anything(self):
        return random.choice(self.tensors if random.random() < 0.5 else self.objects)

    def mostly(self, *usual):
        return random.choice(usual) if random.random() < 0.95 else self.anything()

    def rows(self):
        return random.choice(self.tensors) if random.random() < 0.5 else self.x

    def like(self, rows):
        return self.mostly(rows, rows, rows, None, random.choice(self.tensors))

    def parameter(self, rows):
        row = self.x[0]
        with contextlib.suppress(Exception):
            row = rows[0]
        return self.mostly(None, row, row, random.choice(self.tensors))

    def state(self):
        good = torch.ones(2, dtype=torch.int64)
        odd = torch.ones(2, dtype=torch.int64).as_subclass(Odd)
        odd.untyped_storage().resize_(0)
        with FakeTensorMode():
            fake = torch.ones(2, dtype=torch.int64)
        return self.mostly(good, good, good.to(self.x.device), None, odd, fake)

    def dtype(self):
        return self.mostly(None, None, None, torch.float32, torch.bfloat16)

    def rounding(self):
        return self.mostly("once", "before_weight")

    def probability(self):
        return self.mostly(0, 0, 0.0, 0.5, 1, 2.0)


class Odd(torch.Tensor):
    """A subclass, and as a class an object that is no tensor.

    pybind11's TypeError prints all arguments, and PyTorch crashes when it prints a freed tensor.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __repr__(self, **options):
        return "<odd>"


def common(pool: Pool) -> tuple:
    """(tensors, options) of a forward."""
    rows = pool.rows()
    parameters = pool.parameter(rows), pool.parameter(rows)
    tensors = (rows, pool.like(rows), *parameters, pool.state())
    shape = pool.mostly(None, None, (8,), (8,), (3, 8), (2, 3, 8))
    options = Options(
        *(pool.mostly("layer_norm", "rms_norm"), pool.mostly(1e-5, 1e-5, 0.0, -1.0, None), shape),
        *(pool.mostly(True, False), pool.rounding(), pool.probability(), pool.mostly(True, False)),
        *(pool.dtype(), pool.dtype(), pool.mostly(True, False), pool.mostly(False)),
        pool.mostly(True, False),
    )
    return pool.mostly(tensors), pool.mostly(options)


def norm(pool: Pool):
    return fused_op_cuda.norm, common(pool), {}


def norm_forward(pool: Pool):
    return fused_op_cuda.norm_forward, (*common(pool), pool.mostly(True, False)), {}


def norm_backward(pool: Pool):
    rows = pool.rows()
    weight, bias = pool.parameter(rows), pool.parameter(rows)
    tensors = (
        *(pool.mostly(rows, pool.rows()), pool.like(rows), rows, weight, bias),
        *(pool.mostly(pool.stats, pool.stats[:1]), pool.state()),
    )
    options = BackwardOptions(
        *(pool.mostly("layer_norm", "rms_norm"), pool.mostly(1, 1, 1, 2), 1e-5),
        *(pool.mostly(True, False), pool.rounding(), pool.probability()),
        pool.mostly(False, False, True),
        *(pool.mostly(rows.dtype), pool.dtype()),
        *(pool.mostly(getattr(weight, "dtype", torch.float32)), torch.float32, False),
    )
    wanted = pool.mostly((True,) * 4, tuple(random.random() < 0.5 for _ in range(4)))
    return fused_op_cuda.norm_backward, (pool.mostly(tensors), pool.mostly(options), wanted), {}


def norm_backward_into(pool: Pool):
    _, args, _ = norm_backward(pool)
    grads = tuple(pool.like(torch.zeros_like(pool.x[0])) for _ in range(2))
    return fused_op_cuda.norm_backward_into, (*args, grads), {}


def dropout_state(pool: Pool):
    return fused_op_cuda.dropout_state, (pool.anything(),), {}


def public(pool: Pool):
    """A function of the package, with arguments that mostly fit; backward where there is one."""
    rows = pool.rows()
    name = random.choice(["layer_norm", "rms_norm"])
    adds, twin = random.random() < 0.5, random.random() < 0.2
    shape = pool.mostly(None, 8, (8,), (3, 8))
    parameters = [pool.parameter(rows) for _ in range(1 + (name == "layer_norm"))]
    eps = pool.mostly(1e-5, 1e-5, 0, -1.0)
    if twin:
        return getattr(fused_op, name), (rows, shape, *parameters, eps), {}
    options = {
        "normalized_shape": shape,
        "zero_centered": pool.mostly(True, False),
        "rounding": pool.rounding(),
        "dropout_p": pool.probability(),
        "training": pool.mostly(True, False),
        "out_dtype": pool.dtype(),
    }
    options |= {"residual_dtype": pool.dtype()} if adds else {"memory_efficient": pool.mostly(True)}
    options = {key: value for key, value in options.items() if random.random() < 0.3}
    function = getattr(fused_op, f"fused_add_{name}" if adds else f"fused_{name}")
    tensors = (rows, pool.like(rows)) if adds else (rows,)
    return forward_and_backward, (function, *tensors, *parameters, eps), options


def forward_and_backward(function, *args, **options):
    args = [
        t.detach().requires_grad_() if isinstance(t, torch.Tensor) and t.is_floating_point() else t
        for t in args
    ]
    result = function(*args, **options)
    result = result if isinstance(result, tuple) else (result,)
    torch.autograd.backward(result, [torch.ones_like(t) for t in result])


def anything(pool: Pool):
    """Any number of any objects, for every function."""
    names = ("norm", "norm_forward", "norm_backward", "norm_backward_into", "dropout_state")
    names += ("check_main_grads", "build_info")
    functions = [getattr(fused_op_cuda, name) for name in names]
    functions += [fused_op.fused_layer_norm, fused_op.fused_add_rms_norm, fused_op.rms_norm]
    count = random.choice([0, 1, 2, 3, 4, 5, 12])
    args = tuple(pool.anything() for _ in range(count))
    return random.choice(functions), args, {}


if __name__ == "__main__":
    main()
