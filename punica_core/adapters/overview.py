"""What the headers tell of the adapters that a registry has, be they refused or not."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from punica_core.adapters.files import CONFIG_NAME
from punica_core.adapters.registry import AdapterRegistry
from punica_core.adapters.report import AdapterParts, AdapterReport, inspect_ref
from punica_core.errors import AdapterError, ConfigError, ModelNotFound

Shapes = Mapping[str, tuple[int, int]]

_BASE_WINS = "it has the name of the base model, which wins; rename it, or set --served-model-name"


def reports_on(folder: str, shapes: Shapes | None, max_lora_rank: int, against: str = "") -> list[AdapterReport]:
    """On all adapters of a folder, and on what seems to be meant for one, by name.

    shapes: of the base model, whose folder is `against`, if there is one.

    Raises ConfigError if it is not a folder.
    """
    if not os.path.isdir(folder):
        raise ConfigError(f"{folder} is not a folder.")
    registry = AdapterRegistry(Path(folder), ())
    reports = [look_at(registry, name, shapes, max_lora_rank)[0] for name in registry.names()]
    reports += [
        AdapterReport(name, os.path.join(folder, name)).refused(
            ModelNotFound(f"the folder has no {CONFIG_NAME}: no adapter for the server, and not listed by it")
        )
        for name in registry.names_without_config()
    ]
    base_name = os.path.basename(os.path.abspath(against)) if against else None
    reports = [report.refused(ModelNotFound(_BASE_WINS)) if report.name == base_name else report for report in reports]
    return [replace(report, against=against) for report in sorted(reports, key=lambda report: report.name)]


def look_at(
    registry: AdapterRegistry, name: str, shapes: Shapes | None, max_lora_rank: int
) -> tuple[AdapterReport, AdapterParts | None]:
    """The report on one adapter's headers, and what was parsed; None if it is refused. shapes: of the base model.

    Raises ModelNotFound if it has gone, TimeoutError if somebody else waits for its files already.
    """
    try:
        ref = registry.resolve(name)
    except AdapterError as error:
        return AdapterReport(name, str(registry.folder_of(name))).refused(error), None
    return inspect_ref(ref, shapes, max_lora_rank)
