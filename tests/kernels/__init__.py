"""The CUDA kernels: their plans, how they are compiled, kept and loaded, and every one of them."""
