"""What is measured, against whom, and how the figures become tables and plots.

`test_benchmark.py` at the repository root is the everyday entrance; `python -m benchmarks.run` runs
every grid, `python -m benchmarks.plot` and `python -m benchmarks.tables` show its results.
Nothing in the library imports this package.
"""
