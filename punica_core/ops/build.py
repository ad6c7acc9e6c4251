"""Compile the CUDA kernels into one library: ``python -m punica_core.ops.build``.

Needs nvcc and a C++20 compiler, but neither a GPU nor a GPU build of torch: the binding is written on torch's stable
ABI.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

LIBRARY_NAME: Final = "libpunica_kernels.so"
PREBUILT_DIRECTORY: Final = Path(__file__).with_name("prebuilt")
ALL_ARCHS: Final = ("80", "86", "89", "90a", "100a", "120a")
"""Compute capabilities built by default, as far as nvcc knows them."""
TORCH_TARGET_VERSION: Final = "0x020a000000000000"  # 2.10

FLAGS: Final = ("-std=c++20", "-O3", "-Xcompiler=-fPIC", f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}")


class BuildError(RuntimeError):
    """The kernels could not be compiled; the message says what is missing or what the compiler said."""


@dataclass(frozen=True, slots=True)
class Toolchain:
    """What the build uses from the machine."""

    nvcc: Path
    torch_include: Path
    torch_lib: Path
    sources: Path

    @classmethod
    def find(cls) -> Toolchain:
        """Locate nvcc, torch's headers and the kernel sources.

        Raises:
            BuildError: nvcc or the sources are missing.
        """
        nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
        if nvcc is None:
            raise BuildError(
                "nvcc was not found on PATH or in /usr/local/cuda/bin. Install the CUDA toolkit 12.4 or newer (for "
                "example the package cuda-toolkit), or a wheel of Punica with prebuilt kernels, or set "
                "`sgmv: reference` to run without the kernels."
            )
        import torch

        root = Path(torch.__file__).parent
        return cls(Path(nvcc), root / "include", root / "lib", source_directory())

    def known_archs(self) -> tuple[str, ...]:
        """Those of ALL_ARCHS that this nvcc can compile for."""
        listed = subprocess.run(
            [str(self.nvcc), "--list-gpu-arch"], check=True, capture_output=True, text=True
        ).stdout.split()
        return tuple(arch for arch in ALL_ARCHS if f"compute_{arch.rstrip('a')}" in listed)


def source_directory() -> Path:
    """The directory of the CUDA sources: package data of an installation, or the repository's ``csrc``.

    Raises:
        BuildError: neither exists.
    """
    package = Path(__file__).parents[1]
    for candidate in (package / "csrc", package.parent / "csrc"):
        if (candidate / "include" / "punica" / "params.h").is_file():
            return candidate
    raise BuildError(f"the kernel sources are missing: looked in {package / 'csrc'} and {package.parent / 'csrc'}")


def build_key(sources: Path, archs: Sequence[str]) -> str:
    """Digest of everything the library depends on: sources, flags, target architectures."""
    digest = hashlib.sha256(repr((FLAGS, tuple(archs))).encode())
    for path in sorted(p for p in sources.rglob("*") if p.suffix in {".h", ".cuh", ".cu", ".cpp"}):
        digest.update(path.relative_to(sources).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:24]


def build(output: Path, archs: Sequence[str], *, jobs: int = 2, toolchain: Toolchain | None = None) -> Path:
    """Compile every source for ``archs`` and link them into ``output``, with the build key in ``<output>.key``.

    Args:
        output: path of the library; replaced in one step when everything has succeeded.
        archs: compute capabilities such as ``"80"`` or ``"90a"``.
        jobs: compiler processes at a time.

    Raises:
        BuildError: the compiler failed; the message holds what it said.
    """
    tools = toolchain or Toolchain.find()
    sources = sorted((tools.sources / "src").glob("*.c*"))
    targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent) as scratch:
        objects = [Path(scratch) / f"{source.stem}.o" for source in sources]

        def compile_one(source: Path, target: Path) -> None:
            command = [str(tools.nvcc), *FLAGS, *(targets if source.suffix == ".cu" else [])]
            include = [f"-I{tools.sources / 'include'}"]
            if source.suffix == ".cpp":
                include.append(f"-I{tools.torch_include}")
            _run([*command, *include, "-c", str(source), "-o", str(target)])
            print(f"  compiled {source.name}", file=sys.stderr, flush=True)

        print(f"building {output.name} for {', '.join('sm_' + a for a in archs)}", file=sys.stderr, flush=True)
        with ThreadPoolExecutor(max(jobs, 1)) as pool:
            list(pool.map(compile_one, sources, objects))
        library = Path(scratch) / output.name
        link = ["-shared", "-Xlinker", "--no-as-needed", f"-L{tools.torch_lib}", "-ltorch"]
        _run([str(tools.nvcc), *targets, *map(str, objects), *link, "-o", str(library)])
        library.replace(output)
    key_path(output).write_text(build_key(tools.sources, archs) + "\n" + " ".join(archs) + "\n")
    return output


def key_path(library: Path) -> Path:
    """Where the build key of ``library`` is kept."""
    return library.with_suffix(library.suffix + ".key")


def _run(command: Sequence[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise BuildError(
            f"{' '.join(command)}\nfailed with status {result.returncode}:\n{result.stdout}{result.stderr}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Command line of the module."""
    parser = argparse.ArgumentParser(prog="python -m punica_core.ops.build", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--arch", action="append", help=f"compute capability, repeatable; default {' '.join(ALL_ARCHS)}"
    )
    parser.add_argument("--output", type=Path, default=PREBUILT_DIRECTORY / LIBRARY_NAME)
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args(argv)
    try:
        tools = Toolchain.find()
        path = build(args.output, args.arch or tools.known_archs(), jobs=args.jobs, toolchain=tools)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
