"""From an adapter's tensors as stored to what is computed with: each linear of the base with its A, B, gain and bias.

Most modules are taken as they are. A fused one on a split base is cut into views. Split ones on a fused base become one
pair of rank ΣR, B block by block. DoRA becomes a row gain, a trained bias the difference to the base's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from punica_core.adapters.fit import AdapterFit, LoraShare
from punica_core.adapters.header import TensorEntry
from punica_core.lora.base_weights import BaseWeights
from punica_core.lora.dora import embedding_gain, row_gain
from punica_core.lora.tables import ModuleWeights
from punica_core.lora.tensor_reader import check_finite

ALIGNMENT_BYTES = 64

Key = tuple[str, str]
"""(module path, part): where a kept tensor lies."""


class Rooms:
    """One buffer for all tensors that an adapter keeps, in the model's dtype, each aligned."""

    def __init__(self, shapes: Mapping[Key, tuple[int, ...]], dtype: torch.dtype) -> None:
        step = ALIGNMENT_BYTES // dtype.itemsize
        self._places: dict[Key, tuple[int, tuple[int, ...]]] = {}
        self._dtype = dtype
        self._end = 0
        for key, shape in shapes.items():
            self._places[key] = (self._end, shape)
            self._end += math.ceil(math.prod(shape) / step) * step
        self._buffer: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self._end * int(self._dtype.itemsize)

    def allocate(self) -> None:
        """Make the buffer. Not a cleared one: the gaps between aligned tensors are never read."""
        self._buffer = torch.empty(self._end, dtype=self._dtype)

    def __contains__(self, key: Key) -> bool:
        return key in self._places

    def __getitem__(self, key: Key) -> Tensor:
        """The room of a tensor, contiguous, after `allocate`."""
        assert self._buffer is not None
        start, shape = self._places[key]
        return self._buffer[start : start + math.prod(shape)].view(shape)


def kept_shapes(fit: AdapterFit) -> dict[Key, tuple[int, ...]]:
    """Every tensor that the adapter keeps, with its shape."""
    kept: dict[Key, tuple[int, ...]] = {}
    for path in linear_paths(fit):
        in_features, out_features = fit.shapes[path]
        shares = fit.linears.get(path, [])
        if is_whole(fit, path):
            module = shares[0].module
            kept[module.path, "a"], kept[module.path, "b"] = module.a.shape, module.b.shape
        else:
            lora_rank = max(1, sum(share.module.lora_rank for share in shares))
            kept[path, "a"], kept[path, "b"] = (lora_rank, in_features), (out_features, lora_rank)
        if _has_gain(shares):
            kept[path, "row_gain"] = (out_features,)
        if _has_bias(fit, path):
            kept[path, "bias"] = (out_features,)
    embedding = fit.embedding
    if embedding is not None:
        kept[embedding.path, "a"] = (embedding.in_features, embedding.lora_rank)
        kept[embedding.path, "b"] = embedding.b.shape
        if embedding.magnitude is not None:
            kept[embedding.path, "row_gain"] = (embedding.out_features,)
    kept.update({(path, "saved"): entry.shape for path, entry in fit.saved.items()})
    kept.update({(path, "rows"): trained.rows.shape for path, trained in fit.token_rows.items()})
    return kept


def linear_paths(fit: AdapterFit) -> list[str]:
    """The base's linears that the adapter changes, sorted."""
    return sorted(fit.linears.keys() | fit.biases.keys())


def is_whole(fit: AdapterFit, path: str) -> bool:
    """Whether one module of the adapter covers all rows of the linear, so that its A and B are used as they are."""
    shares = fit.linears.get(path, [])
    return len(shares) == 1 and shares[0].rows.count == fit.shapes[path][1]


class Assembler:
    """Builds an adapter's parts. raw: the tensors that were not read into their room, by name."""

    def __init__(
        self,
        fit: AdapterFit,
        rooms: Rooms,
        raw: Mapping[str, Tensor],
        base: BaseWeights | None,
        progress: Callable[[], None],
    ) -> None:
        self._fit = fit
        self._rooms = rooms
        self._raw = raw
        self._base = base
        self._progress = progress

    def linear(self, path: str) -> ModuleWeights:
        """The linear at `path`. Raises AdapterInvalid if a gain, a bias or a product is not finite."""
        shares = self._fit.linears.get(path, [])
        weights = self._whole(shares[0]) if is_whole(self._fit, path) else self._joint(path, shares)
        gain = self._gain(path, shares)
        bias = self._bias(path, shares, gain)
        return ModuleWeights(weights.a, weights.b, weights.scale, gain, bias)

    def embedding(self) -> ModuleWeights | None:
        """LoRA on the embedding: a [R, V], a transposed view of [V, R] as the ops read it; b [H, R]."""
        module = self._fit.embedding
        if module is None:
            return None
        base = self._known_base()
        a, b = self._rooms[module.path, "a"], self._rooms[module.path, "b"]
        a.copy_(self._raw[module.a.name].t())
        gain = None
        if module.magnitude is not None:
            weight = base.weight(str(self._fit.shapes.embedding))
            magnitude = self._raw[module.magnitude.name]
            gain = self._cast(
                (module.path, "row_gain"),
                embedding_gain(weight, a.t(), b, module.scale, magnitude, self._progress),
                f"the DoRA gain of {module.path!r}",
            )
        return ModuleWeights(a.t(), b, module.scale * base.embedding_scale, gain)

    def replaced(self, path: str, part: str) -> Tensor:
        """A matrix or rows that stand in place of the base's, as the module gives them out: scaled if an embedding.

        Raises AdapterInvalid if a product is not finite.
        """
        room = self._rooms[path, part]
        if path == self._fit.shapes.embedding and self._known_base().embedding_scale != 1.0:
            room *= self._known_base().embedding_scale
            check_finite(room, f"the trained weight of {path!r}, times the scale of the base's embedding,")
        return room

    def _whole(self, share: LoraShare) -> ModuleWeights:
        module, rows = share.module, share.rows
        b = self._rooms[module.path, "b"][rows.source : rows.source + rows.count]
        return ModuleWeights(self._rooms[module.path, "a"], b, module.scale)

    def _joint(self, path: str, shares: list[LoraShare]) -> ModuleWeights:
        """Several modules as one; without any a pair that adds nothing, which carries the bias."""
        a, b = self._rooms[path, "a"], self._rooms[path, "b"]
        b.zero_()
        if not shares:
            a.zero_()
            return ModuleWeights(a, b, 1.0)
        scales = {share.module.scale for share in shares}
        scale = scales.pop() if len(scales) == 1 else 1.0
        column = 0
        for share in shares:
            module, rows = share.module, share.rows
            columns = slice(column, column + module.lora_rank)
            a[columns] = self._raw[module.a.name]
            part = self._raw[module.b.name][rows.source : rows.source + rows.count]
            factor = 1.0 if module.scale == scale else module.scale
            block = b[rows.target : rows.target + rows.count, columns]
            block.copy_(part * factor)
            if factor != 1.0:
                check_finite(block, f"lora_B of {module.path!r} times its scale")
            column = columns.stop
        return ModuleWeights(a, b, scale)

    def _gain(self, path: str, shares: list[LoraShare]) -> Tensor | None:
        """DoRA's row gain in the model's dtype; 1 for rows that no DoRA module covers."""
        if not _has_gain(shares):
            return None
        weight = self._known_base().weight(path)
        gain = torch.ones(self._fit.shapes[path][1])
        for share in shares:
            module, rows = share.module, share.rows
            source = slice(rows.source, rows.source + rows.count)
            target = slice(rows.target, rows.target + rows.count)
            if module.magnitude is not None:
                a, b = self._matrix(module.path, "a", module.a), self._matrix(module.path, "b", module.b)
                magnitude = self._raw[module.magnitude.name][source]
                gain[target] = row_gain(weight[target], a, b[source], module.scale, magnitude, self._progress)
        return self._cast((path, "row_gain"), gain, f"the DoRA gain of {path!r}")

    def _bias(self, path: str, shares: list[LoraShare], gain: Tensor | None) -> Tensor | None:
        """What is added last: y holds the base's own bias already, and under DoRA multiplied by the gain."""
        if not _has_bias(self._fit, path):
            return None
        own = self._base.bias(path) if self._base is not None and path in self._fit.shapes.biased else None
        before = torch.zeros(self._fit.shapes[path][1]) if own is None else own.detach().float().cpu()
        after = before.clone()
        for bias in self._fit.biases.get(path, []):
            rows = bias.rows
            trained = self._raw[bias.entry.name][rows.source : rows.source + rows.count]
            after[rows.target : rows.target + rows.count] = trained
        for share in shares:
            rows, entry = share.rows, share.module.b_bias
            if entry is not None:
                added = self._raw[entry.name][rows.source : rows.source + rows.count]
                after[rows.target : rows.target + rows.count] += share.module.scale * added
        given = before if gain is None else gain.float() * before
        return self._cast((path, "bias"), after - given, f"the bias of {path!r}")

    def _matrix(self, path: str, part: str, entry: TensorEntry) -> Tensor:
        return self._rooms[path, part] if (path, part) in self._rooms else self._raw[entry.name]

    def _cast(self, key: Key, values: Tensor, what: str) -> Tensor:
        room = self._rooms[key]
        room.copy_(values)
        check_finite(room, what)
        return room

    def _known_base(self) -> BaseWeights:
        assert self._base is not None, "the reader refuses adapters that need it"
        return self._base


def _has_gain(shares: list[LoraShare]) -> bool:
    return any(share.module.magnitude is not None for share in shares)


def _has_bias(fit: AdapterFit, path: str) -> bool:
    shares = fit.linears.get(path, [])
    own = _has_gain(shares) and path in fit.shapes.biased
    return own or path in fit.biases or any(share.module.b_bias is not None for share in shares)
