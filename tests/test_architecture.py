"""Rules of the code base that a machine can check."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import LONGEST_FIRST

ROOT = Path(__file__).parents[1]
MAX_LINES = 400


def python_files() -> list[Path]:
    roots = ("app", "punica_core", "tests", "load_tests", "examples")
    return sorted(path for root in roots for path in (ROOT / root).rglob("*.py"))


def kernel_files() -> list[Path]:
    return sorted(path for kind in ("*.cuh", "*.cu", "*.h", "*.cpp") for path in (ROOT / "csrc").rglob(kind))


def test_no_file_is_longer_than_400_lines() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in [*python_files(), *kernel_files()]}
    assert lengths
    too_long = {str(path.relative_to(ROOT)): lines for path, lines in lengths.items() if lines > MAX_LINES}
    assert not too_long, "a file that long is usually two rooms"


@pytest.mark.parametrize("module", ["app.cli", "app.main", "punica_core", "punica_core.client"])
def test_the_front_end_imports_neither_torch_nor_transformers(module: str) -> None:
    program = f"import sys, {module}; print(sorted({{'torch', 'transformers', 'peft'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_files_that_come_first_are_there() -> None:
    assert [name for name in LONGEST_FIRST if not (ROOT / "tests" / name).is_file()] == []


BY_NAME = re.compile(r"pip install [^\n]*\bpunica\[")
"""Extras asked for by the project's name, under which PyPI has another project."""


def test_extras_are_installed_from_the_checkout_and_never_by_name() -> None:
    texts = [path for kind in ("*.md", "*.yaml") for path in ROOT.glob(f"[!.]*/**/{kind}")]
    texts += [ROOT / "README.md", ROOT / "Makefile", ROOT / "Dockerfile", *python_files()]
    hints = {path.name: path.read_text() for path in texts if "pip install" in path.read_text()}
    assert {"README.md", "extras.py", "single-gpu.yaml"} <= hints.keys()
    assert [name for name, text in hints.items() if BY_NAME.search(text)] == []
    assert BY_NAME.search("needs FlashInfer: pip install 'punica" + "[gpu]'")


def test_only_the_bindings_see_torch() -> None:
    seeing = {path.name for path in kernel_files() if "torch/" in path.read_text()}
    assert "bindings.cpp" in seeing or "bindings.h" in seeing
    assert all(name.startswith("bindings") for name in seeing)
