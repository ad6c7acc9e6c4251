"""The bodies of the routes that load and unload adapters: vLLM's."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

Name = Annotated[str, Meta(min_length=1, max_length=512)]
Path = Annotated[str, Meta(min_length=1, max_length=4096)]


class LoadAdapter(msgspec.Struct, frozen=True):
    """lora_path: a folder below one of the adapter roots. load_inplace: replace what has that name.

    is_3d_lora_weight asks for experts' weights, which are not served.
    """

    lora_name: Name
    lora_path: Path
    load_inplace: bool | None = None
    is_3d_lora_weight: bool | None = None


class UnloadAdapter(msgspec.Struct, frozen=True):
    """lora_int_id means nothing here."""

    lora_name: Name
    lora_int_id: int | None = None
