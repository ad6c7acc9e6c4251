"""`punica adapters …`: look at, convert and pack adapters."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from punica_core.adapters.overview import look_at
from punica_core.adapters.registry import AdapterRegistry
from punica_core.adapters.report_text import table
from punica_core.errors import ConfigError

TORCH_ACTIONS = {
    "validate": "account for every tensor, read every number, and say what is refused",
    "convert": "pickle, other names and prefixes: written anew as PEFT saves it today",
    "pack": "a folder becomes one file in the layout of GPU memory",
    "bench": "loading from a folder beside loading a packed file",
}
"""What needs torch, and so runs as a program of its own."""

_PROGRAM = (sys.executable, "-m", "punica_core.adapter_tools")
_NO_LIMIT = 2**31
_NOT_LOOKED_AT = (
    '"served" goes by what the headers say. Whether an adapter fits a base model, and whether its numbers are sound, '
    "is told by: punica adapters validate --model BASE_FOLDER ADAPTER_FOLDER"
)


def add_to(commands: Any) -> None:
    """Add `adapters` to the program's commands."""
    adapters = commands.add_parser("adapters", help="look at, convert and pack adapters")
    actions = adapters.add_subparsers(required=True, metavar="action")
    listed = actions.add_parser("list", help="the adapters of a folder, and what their headers say")
    listed.add_argument("folder", metavar="FOLDER", help="what --adapters names")
    listed.add_argument("--json", action="store_true", help="print JSON")
    listed.set_defaults(run=_list)
    for name, text in TORCH_ACTIONS.items():
        # its own program knows its flags, --help too
        action = actions.add_parser(name, help=text, add_help=False, prefix_chars="\0")
        action.add_argument("arguments", nargs="*", help="see its --help")
        action.set_defaults(run=_run_program, action=name)


def _run_program(options: argparse.Namespace) -> int:
    code = subprocess.call([*_PROGRAM, options.action, *options.arguments])
    if code < 0:
        print(f"error: the process that was to {options.action} was ended by signal {-code}.", file=sys.stderr)
        return 1
    return code


def _list(options: argparse.Namespace) -> int:
    """0 also if some are refused: that is what it is to tell."""
    if not Path(options.folder).is_dir():
        raise ConfigError(f"{options.folder} is not a folder.")
    registry = AdapterRegistry(Path(options.folder), ())
    reports = [look_at(registry, name, None, _NO_LIMIT)[0] for name in registry.names()]
    if options.json:
        print(json.dumps([report.to_json() for report in reports], indent=2))
    elif reports:
        print(table(reports))
        if any(report.is_served for report in reports):
            print(f"\n{_NOT_LOOKED_AT}")
    else:
        print(f"{options.folder} has no adapters.")
    return 0
