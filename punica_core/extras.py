"""Packages that only some uses need: the extras of pyproject.toml."""

from __future__ import annotations


def how_to_install(extra: str) -> str:
    """The command, from a checkout. Never by name: `punica` on PyPI is another project's."""
    return f".venv/bin/pip install -c constraints.txt -e '.[{extra}]'"
