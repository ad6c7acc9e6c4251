from __future__ import annotations

import subprocess
import sys

import pytest

import punica_core

PROGRAM = """
import sys
import punica_core
assert "torch" not in sys.modules, "the import alone loads torch"
assert {"BatchLoRA", "LoRALinear", "LoRAWeight"} <= set(dir(punica_core))
assert "torch" not in sys.modules
from punica_core import LoRAWeight
assert "torch" in sys.modules and "transformers" not in sys.modules
assert LoRAWeight is punica_core.LoRAWeight
"""


def test_importing_the_package_loads_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'BatchLora'"):
        punica_core.BatchLora  # noqa: B018
