"""Find or build the compiled kernels and register them as the CUDA implementation of the ops."""

from __future__ import annotations

import os
from pathlib import Path

import torch

import punica_core.ops
import punica_core.ops.plan
import punica_core.ops.sample  # noqa: F401  (all three define schemas that the library implements)
from punica_core.ops.build import (
    LIBRARY_NAME,
    PREBUILT_DIRECTORY,
    BuildError,
    Toolchain,
    build,
    build_key,
    key_path,
    source_directory,
)


def is_loaded() -> bool:
    """Whether the CUDA kernels are registered in this process."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key("punica::lora_shrink", "CUDA"))


def load(library: Path | None = None, *, cache_directory: Path | None = None) -> None:
    """Register the CUDA kernels. Does nothing when they are registered already.

    Args:
        library: a compiled library; default: the prebuilt one if it matches the sources, else one built for this
            machine's GPU and kept in ``cache_directory``.
        cache_directory: default ``~/.cache/punica/kernels``.

    Raises:
        BuildError: nothing prebuilt fits, and building failed. The message says what to install.
    """
    if is_loaded():
        return
    path = library or _prebuilt() or _built(cache_directory or Path.home() / ".cache" / "punica" / "kernels")
    torch.ops.load_library(str(path))
    if not is_loaded():
        raise BuildError(f"{path} does not implement punica::lora_shrink for CUDA; delete it and try again")


def arch_of(major: int, minor: int) -> str:
    """The build target of a GPU. From 9.0 on, kernels use features of exactly that architecture."""
    return f"{major}{minor}a" if major >= 9 else f"{major}{minor}"


def _prebuilt() -> Path | None:
    """The prebuilt library, unless the sources beside it have changed since or it lacks this GPU's architecture."""
    library = PREBUILT_DIRECTORY / LIBRARY_NAME
    if not library.is_file() or not key_path(library).is_file():
        return None
    key, archs = key_path(library).read_text().splitlines()
    if torch.cuda.is_available() and arch_of(*torch.cuda.get_device_capability()) not in archs.split():
        return None
    return library if key == build_key(source_directory(), archs.split()) else None


def _built(cache_directory: Path) -> Path:
    """The library for this machine's GPU, compiled on first use and kept under its build key."""
    if not torch.cuda.is_available():
        raise BuildError("no GPU was found, so there is no architecture to build the kernels for; pass a library")
    tools = Toolchain.find()
    archs = (arch_of(*torch.cuda.get_device_capability()),)
    output = cache_directory / build_key(tools.sources, archs) / LIBRARY_NAME
    return output if output.is_file() else build(output, archs, jobs=os.cpu_count() or 1, toolchain=tools)
