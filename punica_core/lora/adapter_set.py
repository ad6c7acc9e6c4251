"""Several adapters on one device, laid out as the ops read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from punica_core.lora.segments import Int32Array
from punica_core.lora.tables import AdapterTables, Arena, ModuleWeights, num_module_elements
from punica_core.lora.weight import LoRAWeight
from punica_core.ops.layout import row_pitch
from punica_core.ops.reference import read_record


class AdapterSet:
    """A fixed list of adapters; the slot of each is its place in the list.

    paths: the modules that at least one of them adapts, sorted; a module's place here is its index.
    """

    def __init__(
        self, adapters: Sequence[Mapping[str, LoRAWeight]], *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.paths: tuple[str, ...] = tuple(sorted({path for adapter in adapters for path in adapter}))
        self.num_adapters = len(adapters)
        self.max_rank = row_pitch(max((w.lora_rank for a in adapters for w in a.values()), default=1))
        index_of = {path: index for index, path in enumerate(self.paths)}
        converted = [
            {index_of[path]: ModuleWeights(weight.a, weight.b, weight.scale) for path, weight in adapter.items()}
            for adapter in adapters
        ]
        num_elements = sum(num_module_elements(module) for modules in converted for module in modules.values())
        self._arena = Arena(num_elements, dtype=dtype, device=device)
        self._tables = AdapterTables(len(self.paths), max(len(adapters), 1), device=device)
        for slot, modules in enumerate(converted):
            self._tables.write(slot, modules, self._arena)
        self._groups = tuple(self._tables.group(index, 1) for index in range(len(self.paths)))
        self._modules: tuple[dict[int, ModuleWeights], ...] = tuple({} for _ in self.paths)
        for slot, modules in enumerate(converted):
            for index, weights in modules.items():
                self._modules[index][slot] = self._stored(index, slot, weights)

    @property
    def arena(self) -> Tensor:
        """The matrices, 1-D: see `punica_core.ops.layout`."""
        return self._arena.buffer

    @property
    def slot_rank(self) -> Int32Array:
        """int32 [N]: the largest lora_rank of each slot."""
        return self._tables.slot_rank

    @property
    def nbytes(self) -> int:
        """Bytes of the matrices on the device."""
        return int(self.arena.nbytes)

    def modules(self, index: int) -> Mapping[int, ModuleWeights]:
        """Module `index` of each slot that adapts it, as views of the arena."""
        return self._modules[index]

    def _stored(self, index: int, slot: int, weights: ModuleWeights) -> ModuleWeights:
        record = read_record(self._groups[index], 0, slot)
        (lora_rank, in_features), out_features = weights.a.shape, weights.b.size(0)
        a = self.arena.as_strided((lora_rank, in_features), (in_features, 1), record.a_offset)
        b = self.arena.as_strided((out_features, lora_rank), (row_pitch(lora_rank), 1), record.b_offset)
        return ModuleWeights(a, b, weights.scale)

    def table(self, index: int) -> Tensor:
        """int64 [1, N, RECORD_WORDS]: the records of module `index`, a view."""
        return self._groups[index]
