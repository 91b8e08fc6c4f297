"""The table of the variants in docs/performance.md."""

from benchmarks import variant_table


def test_the_fastest_other_is_named_for_each_direction() -> None:
    """Catches a slower peer, fused_op among the others, and a column that moved."""
    row = {
        "variant": "l2_norm", "rows": 8, "cols": 4,
        "peers": {
            "fused_op": {"forward": 0.99, "backward": 0.9},
            "FLA": {"forward": 0.5, "backward": 0.8},
            "eager": {"forward": 0.61},
            "Liger": {"problem": "ImportError: none"},
        },
    }  # fmt: skip
    rounding = {"variant": "quantized", "rows": 8, "cols": 4, "peers": {"fused_op": {"forward": 1}}}
    assert variant_table.table([row, rounding]).splitlines() == [
        "| variant | rows x columns | forward | best other | backward | best other |",
        "|---|---|---|---|---|---|",
        "| l2_norm | 8 x 4 | 0.99 | 0.61 eager | 0.90 | 0.80 FLA |",
        "| quantized | 8 x 4 | 1.00 |  |  |  |",
    ]


def test_without_others_there_is_no_column_for_them() -> None:
    row = {"variant": "l2_norm", "rows": 8, "cols": 4, "peers": {"fused_op": {"forward": 1}}}
    assert variant_table.table([row]).splitlines()[0] == (
        "| variant | rows x columns | forward | backward |"
    )
