from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from punica_core.ops import build


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    return Path(shutil.copytree(build.source_directory(), tmp_path / "csrc"))


def test_the_key_follows_sources_and_architectures(sources: Path) -> None:
    key = build.build_key(sources, ["80"])
    assert build.build_key(sources, ["80"]) == key
    assert build.build_key(sources, ["80", "90a"]) != key
    header = sources / "include" / "punica" / "params.h"
    header.write_text(header.read_text() + "\n")
    assert build.build_key(sources, ["80"]) != key


def test_without_nvcc_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_args, **_kwargs: None)
    with pytest.raises(build.BuildError, match=r"CUDA toolkit .*`sgmv: reference`"):
        build.Toolchain.find()


def test_headers_know_no_torch() -> None:
    for header in (build.source_directory() / "include").rglob("*.*h"):
        assert "torch" not in header.read_text().replace("No torch here", ""), header.name


@pytest.mark.slow
def test_the_library_builds_and_loads_beside_a_cpu_torch(nvcc: str, tmp_path: Path) -> None:
    library = build.build(tmp_path / build.LIBRARY_NAME, ["80", "90a"])
    code = f"from pathlib import Path; from punica_core.ops import cuda; cuda.load(Path({str(library)!r}))"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_a_compiler_error_is_shown(nvcc: str, sources: Path, tmp_path: Path) -> None:
    tools = build.Toolchain.find()
    (sources / "src" / "broken.cu").write_text("this is not C++\n")
    broken = build.Toolchain(tools.nvcc, tools.torch_include, tools.torch_lib, sources)
    for other in (sources / "src").glob("*_*.c*"):
        other.unlink()
    (sources / "src" / "bindings.cpp").unlink()
    with pytest.raises(build.BuildError, match="not"):
        build.build(tmp_path / "out.so", ["80"], toolchain=broken)
    assert not (tmp_path / "out.so").exists()
