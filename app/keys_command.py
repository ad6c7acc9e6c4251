"""`punica keys new` and `punica keys hash`: what goes into a file of keys."""

from __future__ import annotations

import argparse
import getpass
import sys
from typing import Any

from app.keys import check_name, hash_of, new_token


def add_to(commands: Any) -> None:
    """Add `keys` to the program's commands."""
    keys = commands.add_parser("keys", help="make API keys, and the hashes that a file of keys holds")
    actions = keys.add_subparsers(required=True, metavar="action")
    new = actions.add_parser("new", help="make a key, and print its entry for the file of keys")
    new.add_argument("name", help="name of who will use it: letters, digits, '.', '_' and '-'")
    new.set_defaults(run=_new, parser=new)
    hashed = actions.add_parser("hash", help="print the hash of a key that is typed, or piped in")
    hashed.set_defaults(run=_hash, parser=hashed)


def _new(options: argparse.Namespace) -> int:
    check_name(options.name)
    token = new_token()
    # The key alone goes to stdout, so that it can be piped to where it is needed and is in no terminal's history.
    print(f"  - name: {options.name}\n    key: {hash_of(token)}", file=sys.stderr)
    print(token)
    return 0


def _hash(options: argparse.Namespace) -> int:
    token = getpass.getpass("Key: ") if sys.stdin.isatty() else sys.stdin.readline().rstrip("\r\n")
    print(hash_of(token))
    return 0
