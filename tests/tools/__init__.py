"""The benchmarks' own tests; long runs that fuzz, train and look for leaks, a share of each."""
