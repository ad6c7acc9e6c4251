"""Whether an adapter is served, as far as headers tell, looked at once for all whose headers say the same: of adapters
that one script has trained, only their numbers differ."""

from __future__ import annotations

import hashlib
import os

from punica_core.adapters.files import CONFIG_NAME, WEIGHTS_NAME, SourceFile
from punica_core.adapters.header import raw_header
from punica_core.adapters.overview import Shapes
from punica_core.adapters.packed_header import raw_head
from punica_core.adapters.peft_config import MAX_CONFIG_BYTES
from punica_core.adapters.registry import AdapterRegistry
from punica_core.adapters.report import inspect_ref
from punica_core.errors import AdapterChanged, AdapterError, AdapterInvalid
from punica_core.protocol import AdapterRef


class KnownKinds:
    """shapes: of the base model that adapters must fit; None: only their own files are looked at."""

    def __init__(self, shapes: Shapes | None, max_lora_rank: int) -> None:
        self._shapes = shapes
        self._max_lora_rank = max_lora_rank
        self._verdicts: dict[bytes, str] = {}  # "": served

    def refusal(self, registry: AdapterRegistry, name: str) -> str:
        """Why the adapter is refused, "" if it is not. What may be wrong with the files of one alone, since somebody
        was writing them or a disk did not give them, says nothing of others.

        Raises ModelNotFound if it has gone, TimeoutError if somebody else waits for its files already.
        """
        try:
            ref = registry.resolve(name)
            kind = kind_of(ref)
        except AdapterError as error:
            return error.message
        if kind not in self._verdicts:
            report, _ = inspect_ref(ref, self._shapes, self._max_lora_rank)
            if report.code in (AdapterInvalid.code, AdapterChanged.code):
                return report.reason
            self._verdicts[kind] = report.reason
        return self._verdicts[kind]


def kind_of(ref: AdapterRef) -> bytes:
    """Digest of all that `inspect_ref` reads. Raises what that refuses the adapter with before anything is parsed."""
    digest = hashlib.blake2b(digest_size=16)
    if ref.packed:
        with SourceFile(ref.path, ref.weights_signature) as file:
            parts = [str(file.size).encode(), raw_head(file)[0]]
    else:
        with (
            SourceFile(os.path.join(ref.path, CONFIG_NAME), ref.config_signature) as config,
            SourceFile(os.path.join(ref.path, WEIGHTS_NAME), ref.weights_signature) as weights,
        ):
            size = min(config.size, MAX_CONFIG_BYTES + 1)  # a longer one is refused
            parts = [str(weights.size).encode(), raw_header(weights), config.read(0, size)]
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()
