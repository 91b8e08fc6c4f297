"""Which shapes are measured, and the figure each of them has to reach: data, no measuring.

`TARGETS` is the one place that knows a target; the grids are made from it. Three fractions of the
limit, 1.00 being the limit itself: `f` = device copy / forward, `b` = device add / backward,
`fb` = (copy + add) / (training forward + backward). `f` is measured without gradients, so nothing
is written but the output; `fb` counts a forward that also writes its statistics.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

OPS = (
    *("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm"),
    *("dropout_add_layer_norm", "dropout_add_rms_norm"),
)
DROPOUT_P = 0.1
DTYPES = ("float32", "float16", "bfloat16", "float64")
ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}

# The shapes of the first table of test_benchmark.py, in fp32.
EAGER_SHAPES = ((32, 512), (64, 1024), (128, 2048), (256, 4096))

# Figure -> what has to be timed for it.
MODES = {
    "f": ("forward",),
    "forward_us": ("forward",),
    "b": ("backward",),
    "backward_us": ("backward",),
    "fb": ("training_forward", "backward"),
}
ALL_MODES = ("forward", "training_forward", "backward")


@dataclass(frozen=True)
class Target:
    """One figure to reach; fractions are lower bounds, microseconds (`*_us`) upper bounds."""

    group: str  # in the words of the table
    figure: str
    op: str
    dtype: str
    rows: int
    cols: int
    value: float

    def met_by(self, figure: float) -> bool:
        """Whether a measured figure reaches the target; nothing is rounded in its favour."""
        return figure <= self.value if self.figure.endswith("_us") else figure >= self.value


@dataclass(frozen=True)
class Case:
    """One problem to measure: an op at a shape, and what of it is timed."""

    op: str
    dtype: str
    rows: int
    cols: int
    modes: tuple[str, ...] = ALL_MODES

    @property
    def key(self) -> str:
        return f"{self.op} {self.dtype} {self.rows}x{self.cols}"

    @property
    def has_residual(self) -> bool:
        return "add_" in self.op

    @property
    def drops(self) -> bool:
        return self.op.startswith("dropout_")

    @property
    def has_bias(self) -> bool:
        return self.op.endswith("layer_norm")

    def limit_bytes(self, mode: str) -> int:
        """Bytes that no implementation can avoid: every large tensor read or written once.

        Forward moves x and y, and with a residual also residual and sum. Backward moves x, dy and
        dx, and with a residual also the gradient of the sum; the gradients of input and residual
        are one buffer, unless elements of the input are dropped. Parameters and statistics are not
        counted.
        """
        plain = 3 if mode == "backward" else 2
        tensors = 4 if self.has_residual else plain
        tensors += self.drops and mode == "backward"
        return tensors * self.rows * self.cols * ITEM_BYTES[self.dtype]


def rows_for(cols: int) -> int:
    """Rows that make a large tensor: 2^26 elements for narrow rows, 2^27 for the others."""
    return (1 << (26 if cols <= 256 else 27)) // cols


def _large(
    group: str,
    figure: str,
    cols: Iterable[int],
    value: float,
    dtype: str = "bfloat16",
    op: str = "layer_norm",
) -> Iterator[Target]:
    for width in cols:
        yield Target(group, figure, op, dtype, rows_for(width), width, value)


def _at(
    group: str, figure: str, shapes: dict[tuple[int, int], float], op: str = "layer_norm"
) -> Iterator[Target]:
    for (rows, cols), value in shapes.items():
        yield Target(group, figure, op, "bfloat16", rows, cols, value)


_ODD = (255, 1023, 4095)
_NARROW_ROWS = 1 << 22
_LONG = "32768 to 131072 columns"

# Each grid's lines of the target table.
_TARGETS_OF: dict[str, tuple[Target, ...]] = {
    "large": (
        *_large("64 to 1024 columns", "f", (64, 128, 256, 512, 768, 1024), 0.99),
        *_large("2048 to 8192 columns", "f", (2048, 4096, 8192), 0.98),
        *_large("5120, 12288, 16384 columns", "f", (5120, 12288, 16384), 0.97),
        *_large(_LONG, "f", (32768, 65536, 131072), 0.97),
        *_large("262144 columns", "f", (262144,), 0.96),
        *_large(_LONG, "f", (32768, 65536, 131072), 0.97, op="rms_norm"),
        *_large("262144 columns", "f", (262144,), 0.96, op="rms_norm"),
        *_large("1024 to 16384 columns", "f", (1024, 4096, 16384), 0.97, "float32"),
        *_large("64 to 256 columns", "b", (64, 128, 256), 0.92),
        *_large("768 to 2048 columns", "b", (768, 1024, 2048), 0.95),
        *_large("4096 to 8192 columns", "b", (4096, 5120, 8192), 0.95),
        *_large("12288 columns", "b", (12288,), 0.92),
        *_large("16384 columns", "b", (16384,), 0.90),
        *_large(_LONG, "b", (32768, 65536, 131072), 0.85),
        *_large("262144 columns", "b", (262144,), 0.80),
        *_large(_LONG, "b", (32768, 65536, 131072), 0.85, op="rms_norm"),
        *_large("262144 columns", "b", (262144,), 0.80, op="rms_norm"),
    ),
    "odd": (
        *_large("255, 1023, 4095 columns", "f", _ODD, 0.90),
        *_large("2050 columns", "f", (2050,), 0.95),
        *_large("255, 1023, 2050, 4095, 5001 columns", "f", (*_ODD, 2050, 5001), 0.95, "float32"),
        *_large("255, 1023, 2050, 4095 columns", "b", (*_ODD, 2050), 0.85),
    ),
    "training": (
        *_at("a small training batch", "fb", {(4096, 768): 0.83, (8192, 1024): 0.85}),
        *_at(
            "a training batch", "fb", {(8192, 4096): 0.92, (4096, 8192): 0.91, (2048, 12288): 0.86}
        ),
    ),
    "tiny": (
        *_at("few rows", "forward_us", {(1, 1024): 1.2, (1, 8192): 1.8, (64, 1024): 1.35}),
        *_at("few rows", "forward_us", {(256, 4096): 2.6}),
        *_at("few rows", "backward_us", {(1, 1024): 1.25, (64, 1024): 2.2, (128, 2048): 3.5}),
        *_at("few rows", "backward_us", {(256, 4096): 6.0}),
    ),
    "few_rows": (
        *_at("few long rows", "forward_us", {(8, 65536): 3.2, (1, 262144): 3.5}),
        *_at("few long rows", "backward_us", {(8, 65536): 5.0, (1, 262144): 5.0}),
    ),
    "narrow": (
        *_at("1 to 3 columns", "f", {(_NARROW_ROWS, cols): 0.7 for cols in (1, 2, 3)}),
        *_at("4, 8, 16 columns", "f", {(_NARROW_ROWS, cols): 0.85 for cols in (4, 8, 16)}),
    ),
    "residual": tuple(
        target
        for op in ("add_layer_norm", "add_rms_norm")
        for figure, value in (("f", 0.95), ("b", 0.88))
        for target in _large("1024, 4096, 8192 columns", figure, (1024, 4096, 8192), value, op=op)
    ),
    "dropout": tuple(
        target
        for op in ("dropout_add_layer_norm", "dropout_add_rms_norm")
        for figure, value in (("f", 0.93), ("b", 0.85))
        for target in _large("1024, 4096, 8192 columns", figure, (1024, 4096, 8192), value, op=op)
    ),
}
TARGETS = tuple(target for targets in _TARGETS_OF.values() for target in targets)

# Eager forward without gradients over PyTorch's time, host included, at EAGER_SHAPES.
EAGER_TARGET = 0.85

# Without a target: the claim "never slower than the best peer" is tried beside the table, too.
_EXTRA = (
    *(
        Case("layer_norm", "bfloat16", rows_for(cols), cols)
        for cols in (1536, 2560, 3584, 6144, 7168, 10240, 14336, 20480, 49152)
    ),
    *(
        Case("layer_norm", "bfloat16", rows, cols)
        for rows in (3, 100, 2000, 50000)
        for cols in (1024, 4096)
    ),
    *(Case("rms_norm", "bfloat16", rows_for(cols), cols) for cols in (128, 1024, 4096, 8192)),
)

# Widths between the usual ones: rows of whole vectors that are no power of two of them, and rows
# that begin anywhere. Its result has a file of its own.
_EVEN_WIDTHS = (
    *(32, 40, 72, 96, 144, 200, 288, 320, 392, 576, 704, 880, 1088, 1152, 1280, 1544, 1920),
    *(2304, 2880, 3200, 3584, 4608, 5000, 5632, 6656, 7680, 8200, 9216, 11008, 12888, 13824),
    *(14336, 15360, 16384),
)
_ODD_WIDTHS = (255, 333, 511, 769, 1023, 1537, 2047, 2050, 3001, 4095, 5121, 6145, 7777, 8191, 9999)
_WIDTHS = tuple(
    Case(op, "bfloat16", (1 << 26) // cols, cols)
    for ops, widths in ((OPS[:2], _EVEN_WIDTHS), (OPS[:4], _ODD_WIDTHS))
    for cols in widths
    for op in ops
)

# Few rows, odd lengths beside even ones: what an odd length costs where latency counts. Its result
# has a file of its own.
_FEW_ODD_ROWS = tuple(
    Case(op, "bfloat16", rows, cols, ("backward",))
    for op in ("layer_norm", "add_layer_norm")
    for rows, widths in ((64, (4095, 4096)), (128, (1023, 1024)), (200, (2048, 2050)))
    for cols in widths
)


def _cases_of(targets: Iterable[Target]) -> tuple[Case, ...]:
    """One case per problem, timing whatever any of its targets needs."""
    modes: dict[tuple[str, str, int, int], set[str]] = {}
    for target in targets:
        problem = (target.op, target.dtype, target.rows, target.cols)
        modes.setdefault(problem, set()).update(MODES[target.figure])
    return tuple(
        Case(*problem, modes=tuple(mode for mode in ALL_MODES if mode in wanted))
        for problem, wanted in modes.items()
    )


GRIDS: dict[str, tuple[Case, ...]] = {
    # Shapes people train with; few, since torch.compile takes seconds for each.
    "quick": tuple(
        Case("layer_norm", "bfloat16", rows, cols)
        for rows, cols in ((8192, 1024), (8192, 4096), (4096, 8192))
    ),
    **{name: _cases_of(targets) for name, targets in _TARGETS_OF.items()},
    "extra": _EXTRA,
    "few_odd_rows": _FEW_ODD_ROWS,
    "widths": _WIDTHS,
    "all": _cases_of(TARGETS) + _EXTRA,
}


def cases_of(
    grid: Sequence[Case], shapes: Sequence[tuple[int, int]], ops: Sequence[str], dtype: str | None
) -> list[Case]:
    """The given shapes for each op and dtype, else the grid, restricted to the op and dtype."""
    if shapes:
        chosen = ops or OPS[:1]
        return [Case(op, dtype or "bfloat16", *shape) for op in chosen for shape in shapes]
    cases = [Case(op, c.dtype, c.rows, c.cols, c.modes) for op in ops for c in grid] or list(grid)
    if dtype is not None:
        cases = [Case(c.op, dtype, c.rows, c.cols, c.modes) for c in cases]
    return list(dict.fromkeys(cases))


def parse_shape(text: str) -> tuple[int, int]:
    """A shape of the command line."""
    try:
        rows, cols = (int(part) for part in text.split(","))
    except ValueError:
        rows = cols = 0
    if rows < 1 or cols < 1:
        raise argparse.ArgumentTypeError(f"a shape is ROWS,COLS such as 8192,4096; got {text!r}")
    return rows, cols
