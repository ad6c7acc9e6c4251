"""A residency table and loads into it, in one line."""

from __future__ import annotations

from punica_core.adapters.residency import ResidencyTable
from punica_core.errors import AdapterInvalid
from punica_core.protocol import AdapterRef, FileSignature

ERROR = AdapterInvalid("damaged")


def make_ref(name: str, version: int = 0) -> AdapterRef:
    signature = FileSignature(1, 2, 3, version)
    return AdapterRef(name=name, path=f"/{name}", config_signature=signature, weights_signature=signature)


def make_table(budget_bytes: int = 100, num_slots: int = 8, claim_seconds: float = 0.0) -> ResidencyTable:
    return ResidencyTable("host", budget_bytes, num_slots, retry_seconds=2.0, claim_seconds=claim_seconds)


def load(table: ResidencyTable, ref: AdapterRef, nbytes: int, key: str | None = None, now: float = 0.0) -> None:
    assert table.begin(ref, now)
    assert table.reserve(ref, nbytes, now)
    table.commit(ref, key or f"key of {ref.path}", now)
