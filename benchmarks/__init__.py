"""What is measured, compared with what, and how the figures become tables and plots.

`test_benchmark.py` at the repository root is for everyday use; `python -m benchmarks.run` runs
every grid, `python -m benchmarks.plot` and `python -m benchmarks.tables` show its results.
Nothing in the library imports this package.
"""
