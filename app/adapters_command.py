"""`punica adapters …`: look at, convert and pack adapters."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from punica_core.adapters.overview import reports_on
from punica_core.adapters.report_text import list_text

TORCH_ACTIONS = {
    "validate": "account for every tensor, read every number, and say what is refused",
    "convert": "pickle, other names and prefixes: written anew as PEFT saves it today",
    "pack": "a folder becomes one file in the layout of GPU memory",
    "bench": "loading from a folder beside loading a packed file",
}
"""What needs torch, and so runs as a program of its own."""

_PROGRAM = (sys.executable, "-m", "punica_core.adapter_tools")
_NO_LIMIT = 2**31


def add_to(commands: Any) -> None:
    """Add `adapters` to the program's commands."""
    adapters = commands.add_parser("adapters", help="look at, convert and pack adapters")
    actions = adapters.add_subparsers(required=True, metavar="action")
    listed = actions.add_parser("list", help="the adapters of a folder, and what their headers say")
    listed.add_argument("folder", metavar="FOLDER", help="what --adapters names")
    listed.add_argument("--model", metavar="FOLDER", help="base model: its config.json says whether an adapter fits")
    listed.add_argument("--max-lora-rank", metavar="RANK", help="the server's, with --model (default: 256)")
    listed.add_argument("--json", action="store_true", help="print JSON")
    listed.set_defaults(run=_list, parser=listed)
    for name, text in TORCH_ACTIONS.items():
        # its own program knows its flags, --help too
        action = actions.add_parser(name, help=text, add_help=False, prefix_chars="\0")
        action.add_argument("arguments", nargs="*", help="see its --help")
        action.set_defaults(run=_run_program, action=name)


def _run_program(options: argparse.Namespace) -> int:
    return _call(options.action, options.arguments)


def _call(action: str, arguments: Sequence[str]) -> int:
    code = subprocess.call([*_PROGRAM, action, *arguments])
    if code < 0:
        print(f"error: the process that was to {action} was ended by signal {-code}.", file=sys.stderr)
        return 1
    return code


def _list(options: argparse.Namespace) -> int:
    """0 also if some are refused: that is what it is to tell."""
    if options.model is not None:  # the base's shapes are known to torch only
        rank = [] if options.max_lora_rank is None else [f"--max-lora-rank={options.max_lora_rank}"]
        return _call("list", [f"--model={options.model}", *rank, *["--json"] * options.json, "--", options.folder])
    reports = reports_on(options.folder, None, _NO_LIMIT)
    if options.json:
        print(json.dumps([report.to_json() for report in reports], indent=2))
    else:
        print(list_text(options.folder, reports, ""))
    return 0
