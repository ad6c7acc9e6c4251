"""An adapter named by a path of this machine: a folder that PEFT saved, or a packed file. For tools and the library;
what clients may name is found by `punica_core.adapters.registry`."""

from __future__ import annotations

import os
import stat

from punica_core.adapters.files import CONFIG_NAME, PICKLE_NAMES, WEIGHTS_NAME, signature_of
from punica_core.adapters.header import CONVERT_PICKLE
from punica_core.adapters.packed_header import SUFFIX
from punica_core.errors import AdapterInvalid, AdapterUnsupported
from punica_core.protocol import AdapterRef


def ref_of(path: str) -> AdapterRef:
    """The adapter's files in their present state. Raises AdapterInvalid or AdapterUnsupported if it has none."""
    name = os.path.basename(os.path.abspath(path))
    status = _stat(path)
    if status is not None and stat.S_ISREG(status.st_mode) and path.endswith(SUFFIX):
        state = signature_of(status)
        stem = name.removesuffix(SUFFIX)
        return AdapterRef(name=stem, path=path, config_signature=state, weights_signature=state, packed=True)
    if status is None or not stat.S_ISDIR(status.st_mode):
        raise AdapterInvalid(f"{path!r} is neither a folder nor a {SUFFIX} file.")
    config, weights = _stat(os.path.join(path, CONFIG_NAME)), _stat(os.path.join(path, WEIGHTS_NAME))
    if config is None:
        raise AdapterInvalid(
            f"{path!r} has no {CONFIG_NAME}: it is not a folder that PEFT saved an adapter to.{_inside(path)}"
        )
    if weights is None:
        if any(os.path.lexists(os.path.join(path, pickle)) for pickle in PICKLE_NAMES):
            raise AdapterUnsupported(f"{path!r} has pickled weights only. {CONVERT_PICKLE}")
        raise AdapterInvalid(f"{path!r} has no weights: {WEIGHTS_NAME} is missing.")
    return AdapterRef(
        name=name, path=path, config_signature=signature_of(config), weights_signature=signature_of(weights)
    )


def _inside(path: str) -> str:
    """A hint for who has named the folder of all adapters."""
    try:
        names = sorted(os.listdir(path))
    except OSError:
        return ""
    paths = (os.path.join(path, name) for name in names)
    one = next((p for p in paths if p.endswith(SUFFIX) or _stat(os.path.join(p, CONFIG_NAME))), None)
    if one is None:
        return ""
    return f" There are adapters in it: name one, such as {one!r}, or look at all with `punica adapters list`."


def _stat(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except (OSError, ValueError):  # ValueError: a NUL in the path
        return None
