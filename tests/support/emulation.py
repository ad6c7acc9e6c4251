"""CUDA kernels compiled for the CPU, against headers that stand in for those that need a GPU."""

from __future__ import annotations

import subprocess
from pathlib import Path

from punica_core.ops.build import source_directory


def compile_kernels(nvcc: str, kernels: Path, output: Path, sources: Path | None = None) -> Path:
    """Compile the file `kernels` for the CPU; headers beside it come before those of `sources`. Returns `output`."""
    include = [f"-I{kernels.parent}", f"-I{(sources or source_directory()) / 'include'}"]
    # Not fortified: fibers jump between stacks. No unique symbols: libraries of one process would share their state.
    flags = ["-std=c++20", "-O1", "-x", "c++", "-Xcompiler=-fPIC,-w,-U_FORTIFY_SOURCE,-fno-gnu-unique", "-shared"]
    subprocess.run([nvcc, *flags, *include, str(kernels), "-o", str(output)], check=True)
    return output
