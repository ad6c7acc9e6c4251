"""What the headers tell of the adapters that a registry has, be they refused or not."""

from __future__ import annotations

from collections.abc import Mapping

from punica_core.adapters.registry import AdapterRegistry
from punica_core.adapters.report import AdapterParts, AdapterReport, inspect_ref
from punica_core.errors import AdapterError


def look_at(
    registry: AdapterRegistry, name: str, shapes: Mapping[str, tuple[int, int]] | None, max_lora_rank: int
) -> tuple[AdapterReport, AdapterParts | None]:
    """The report on one adapter's headers, and what was parsed; None if it is refused. shapes: of the base model.

    Raises ModelNotFound if it has gone, TimeoutError if somebody else waits for its files already.
    """
    try:
        ref = registry.resolve(name)
    except AdapterError as error:
        return AdapterReport(name, str(registry.folder_of(name))).refused(error), None
    return inspect_ref(ref, shapes, max_lora_rank)
