"""`punica adapters list --model | validate | convert | pack | bench`: what needs torch, so a process of its own."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch

from punica_core.adapter_tools import bench
from punica_core.adapter_tools.base import BaseFolder, read_base
from punica_core.adapter_tools.convert import convert
from punica_core.adapter_tools.numbers import examine
from punica_core.adapter_tools.pack import pack
from punica_core.adapter_tools.pickle_file import bound_memory
from punica_core.adapters.files import PICKLE_NAMES, WEIGHTS_NAME
from punica_core.adapters.overview import reports_on
from punica_core.adapters.report import AdapterReport
from punica_core.adapters.report_text import list_text, one_report
from punica_core.errors import AdapterError, PunicaError
from punica_core.stdout import until_unread

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0, 1 if an adapter is refused or nothing could be done, 2 for a wrong command line, 141 if nobody
    reads what is printed."""
    return until_unread(lambda: _main(arguments))


def _main(arguments: Sequence[str] | None) -> int:
    options = _parser().parse_args(arguments)
    torch.set_num_threads(1)  # files this size are read sooner than threads have agreed on who does what
    try:
        return int(options.run(options))
    except AdapterError as error:
        return _failed(options, error.code, f"{options.source}: {error.message}")
    except PunicaError as error:
        return _failed(options, error.code, error.message)


def _failed(options: argparse.Namespace, code: str, message: str) -> int:
    if options.json:
        print(json.dumps({"verdict": "refused", "code": code, "reason": message}))
    else:
        print(f"error: {message}", file=sys.stderr)
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="punica adapters", description="Look at, convert and pack adapters.")
    names = parser.add_subparsers(required=True, metavar="action")
    every = names.add_parser("list", help="the adapters of a folder, and whether they fit a base model")
    every.add_argument("folder", metavar="FOLDER", help="what --adapters names")
    _add_model(every, "base model: its config.json says whether an adapter fits", required=True)
    every.set_defaults(run=_list)
    check = names.add_parser("validate", help="account for every tensor, read every number, and say what is refused")
    check.add_argument("paths", nargs="+", metavar="PATH", help="a folder that PEFT saved, or a packed file")
    _add_model(check, "base model: its config.json says whether an adapter fits (its weights are not loaded)")
    check.add_argument("--tensors", action="store_true", help="a line for every tensor, not one for like ones")
    check.set_defaults(run=_validate)
    change = names.add_parser("convert", help="pickle, other names and prefixes → a folder as PEFT saves it today")
    change.add_argument("source", metavar="SRC", help="the adapter's folder, which stays as it is")
    change.add_argument("target", metavar="DST", help="the new folder")
    _add_model(change, "base model: splits fused names that it has split, and gives the names its prefix")
    change.set_defaults(run=_convert)
    one = names.add_parser("pack", help="a folder → one file in the layout of GPU memory, for one base model")
    one.add_argument("source", metavar="SRC", help="the adapter's folder")
    one.add_argument("target", metavar="DST", help="the new file; it is served under its name without .punica")
    _add_model(one, "the base model that it is for", required=True)
    one.set_defaults(run=_pack)
    bench.add_to(names)
    for sub in (every, check):
        sub.add_argument("--max-lora-rank", type=int, default=256, metavar="RANK", help="the server's (default: 256)")
    for sub in (every, check, change, one):
        sub.add_argument("--json", action="store_true", help="print JSON")
    for sub in (check, one):
        sub.add_argument(
            "--dtype",
            choices=["auto", *_DTYPES],
            default="auto",
            help="what the server computes in (default: the base's own; bfloat16 without --model)",
        )
    return parser


def _add_model(parser: argparse.ArgumentParser, text: str, *, required: bool = False) -> None:
    parser.add_argument("--model", metavar="FOLDER", required=required, help=text)


def _list(options: argparse.Namespace) -> int:
    """0 also if some are refused: that is what it is to tell."""
    reports = reports_on(options.folder, read_base(options.model).shapes, options.max_lora_rank, options.model)
    text = list_text(options.folder, reports, options.model)
    _print(options, [report.to_json() for report in reports], [text])
    return 0


def _validate(options: argparse.Namespace) -> int:
    base = _base(options)
    reports = [examine(path, base, _dtype(options, base), options.max_lora_rank) for path in options.paths]
    _print(options, [report.to_json() for report in reports], [_text(report, options.tensors) for report in reports])
    return 0 if all(report.is_served for report in reports) else 1


def _convert(options: argparse.Namespace) -> int:
    base = _base(options)
    bound_memory(sum(_size(os.path.join(options.source, name)) for name in (WEIGHTS_NAME, *PICKLE_NAMES)))
    done = convert(options.source, options.target, base)
    values = {"target": options.target, "changes": done.changes, "adapter_key": done.report.adapter_key}
    _print(options, values, [f"{options.target} was written.", *(f"  {change}" for change in done.changes)])
    return 0


def _pack(options: argparse.Namespace) -> int:
    base = _base(options)
    assert base is not None, "the parser requires it"
    report = pack(options.source, options.target, base, _dtype(options, base))
    _print(options, report.to_json(), [_text(report, False)])
    return 0 if report.is_served else 1


def _base(options: argparse.Namespace) -> BaseFolder | None:
    return None if options.model is None else read_base(options.model)


def _dtype(options: argparse.Namespace, base: BaseFolder | None) -> torch.dtype:
    if options.dtype != "auto":
        return _DTYPES[options.dtype]
    return torch.bfloat16 if base is None else base.dtype


def _size(path: str) -> int:
    return os.path.getsize(path) if os.path.isfile(path) else 0


def _text(report: AdapterReport, every_tensor: bool) -> str:
    return one_report(report, every_tensor=every_tensor)


def _print(options: argparse.Namespace, values: Any, texts: Sequence[str]) -> None:
    print(json.dumps(values, indent=2) if options.json else "\n".join(texts))


if __name__ == "__main__":
    raise SystemExit(main())
