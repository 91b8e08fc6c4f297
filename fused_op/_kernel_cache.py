"""``python -m fused_op cache``: where kernels that were compiled at their first use are kept."""

from __future__ import annotations

import os

import fused_op_cuda


def cache(clear: bool) -> int:
    """Print the folder, what it holds and what is wrong with it; return the exit status."""
    reason = fused_op_cuda.build_info()["no_cuda_reason"]
    if reason:
        print(f"This build has no CUDA backend, and compiles no kernels: {reason}")
        return 0
    try:
        removed = fused_op_cuda._clear_cache() if clear else 0
    except RuntimeError as error:
        print(f"Not cleared: {error}")
        return 1
    info = fused_op_cuda._cache_info()
    compiler = fused_op_cuda._compiler_identity().rpartition(" ")[0]  # without its build
    print(f"folder    {info['folder'] or 'none'}")
    print(f"kernels   {info['kernels']}" + (f", {removed} removed" if clear else ""))
    print(f"bytes     {info['bytes']}")
    print(f"problem   {info['problem'] + ': kernels are not kept' if info['problem'] else 'none'}")
    print(f"compiler  {compiler or 'none: ' + fused_op_cuda._why_no_compiler()}")
    print(f"package   {info['package_folder']}, {say_kernels(info['package_folder'])}")
    return 1 if info["problem"] else 0


def say_kernels(folder: str) -> str:
    """How many kernels are installed in a folder, which need not exist."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return f"{sum(name.endswith('.kernel') for name in names)} kernels"
