"""Post-norm, addition and pre-norm on the interpreted GPU, by one kernel and by the two ops."""

from __future__ import annotations

import ctypes
from functools import cache

from torch import Tensor

from tests.kernels.interpreter import ROUNDINGS, Gpu, code_of, empty, pointer, rows_of, wide
from tests.kernels.interpreter import library as interpreter
from tests.kernels.toy_variant import ForwardArgs, Rows


@cache
def library() -> ctypes.CDLL:
    made = interpreter()
    made.gpu_post_add_pre.restype = ctypes.c_char_p
    return made


def run(
    gpu: Gpu,
    input: Tensor,
    residual: Tensor,
    post_weight: Tensor | None,
    pre_weight: Tensor | None,
    eps: float = 1e-5,
    rounding: str = "once",
    only_sum: bool = False,
) -> tuple[Tensor, ...] | None:
    """Output, sum and both statistics; None where no kernel takes both norms. Rows are 2-D.

    `only_sum`: what is written without pre-norm, the sum and the statistics of the branch.
    """
    rows, cols = input.shape
    output, total = (empty(rows, cols, dtype=t.dtype) for t in (input, residual))
    post_stats, pre_stats = (empty(1, rows, dtype=wide(input.dtype)) for _ in range(2))

    def args_of(dtype: int, weight: Tensor | None, **others: object) -> ForwardArgs:
        param = code_of(input.dtype if weight is None else weight.dtype)
        return ForwardArgs(
            kind=1, dtype=dtype, param_dtype=param, rounding=ROUNDINGS.index(rounding), rows=rows,
            cols=cols, weight=pointer(weight), eps=eps, **others,
        )  # fmt: skip

    x, r = code_of(input.dtype), code_of(residual.dtype)
    post = args_of(
        x, post_weight, input=rows_of(input), output=Rows(None, x), stats=post_stats.data_ptr()
    )
    pre = args_of(
        r, pre_weight, residual=rows_of(residual),
        output=Rows(None if only_sum else output.data_ptr(), x), sum=total.data_ptr(),
        stats=None if only_sum else pre_stats.data_ptr(),
    )  # fmt: skip
    pre.input.dtype = x
    together = ctypes.c_bool()
    gpu._begin()
    gpu._reads(input=input, residual=residual, post_weight=post_weight, pre_weight=pre_weight)
    gpu._writes(sum=total, post_stats=post_stats)
    if not only_sum:
        gpu._writes(output=output, pre_stats=pre_stats)
    call = ctypes.byref(post), ctypes.byref(pre), ctypes.byref(together)
    problem = library().gpu_post_add_pre(*call)
    if not problem and not together:
        return None
    gpu._end(problem)
    return (total, post_stats) if only_sum else (output, total, post_stats, pre_stats)


def two_ops(
    gpu: Gpu,
    input: Tensor,
    residual: Tensor,
    post_weight: Tensor | None,
    pre_weight: Tensor | None,
    **options: object,
) -> tuple[Tensor, ...]:
    branch, _, post_stats = gpu.forward(norm="rms_norm", input=input, weight=post_weight, **options)
    output, total, pre_stats = gpu.forward(
        norm="rms_norm", input=branch, residual=residual, weight=pre_weight, **options
    )
    return output, total, post_stats, pre_stats
