"""Attention on an NVIDIA GPU over the paged KV cache, by FlashInfer (Ye et al. 2025, arXiv 2501.01005).

Its tensor-core kernel for 16-bit prompts serves decode steps too. It works from a plan, made on the host once a step
and sent ahead of the step, that cuts long contexts into pieces of similar cost. The kernels are called directly,
without FlashInfer's wrapper classes: these copy the step's tables from ordinary memory, which makes the host wait for
the device, and reuse one page-locked buffer, which a loop that runs ahead would overwrite before it has been read.

Decode rows whose contexts are not cut in pieces are attended by a kernel of our own, `ops.decode_attention`, where it
takes the model's heads: it needs no plan, and streams short contexts faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from punica_core import ops
from punica_core.errors import ConfigError
from punica_core.extras import how_to_install
from punica_core.model.attention import AttentionSpec
from punica_core.model.attention_op import AttentionBatch, Lane
from punica_core.model.staging import PinnedRing

HEAD_DIMS = (64, 128, 256)
"""Head dims that the kernels exist for."""

UNCUT_TOKENS = 320
"""Contexts up to so many tokens are not cut in a decode step: merging costs more than it saves."""

OWN_UNCUT_TOKENS = 512
"""The same where our own kernel attends whole contexts (8 sequences of 500 tokens: 11.9 µs whole, 13.9 cut)."""

UNCUT_SHARE = 1.25
"""Nor are they while the longest is at most so many times what every block has to do on average."""

_INT_WORKSPACE_BYTES = 8 << 20
_PROMPT_TILE = 128
"""Most query rows (times query heads of a KV head) of a block."""

_WORK_LIST_BYTES = 16 << 10
"""Covers the three lists of a plan of up to 1,300 pieces, which come first."""
_LAYOUT_NHD = 0
_MASK_NONE, _MASK_CAUSAL = 0, 1
_NO_POSITION_ENCODING = 0


def attends_whole(cache: Tensor, num_heads: int) -> bool:
    """Whether `ops.decode_attention` takes a model's heads. cache: [blocks, L, 2, P, K, D]."""
    block_size, num_kv_heads, head_dim = cache.shape[3:]
    return block_size == 16 and head_dim in (64, 128) and num_heads <= 8 * num_kv_heads


def unsupported_reason(dtype: torch.dtype, head_dim: int) -> str | None:
    """Why FlashInfer cannot serve a model, None if it can."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"its kernels take bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    if head_dim not in HEAD_DIMS:
        return f"its kernels exist for head dims {', '.join(map(str, HEAD_DIMS))}, the model's is {head_dim}"
    return None


class FlashInferAttention:
    """Implements `LayerAttention`. cache: [blocks, L, 2, P, K, D], 16-bit; may be exchanged between steps.

    specs: of each layer; layers that differ in window or soft cap get plans of their own. num_heads: H.
    max_seqs: B of the largest decode lane of a graph. max_prompt_rows, max_prompts: of its largest lane of prompts.
    own_kernel: whole contexts are attended by it where it can. prefetches: steps of few rows fetch what is read behind
    attention while it runs.
    """

    def __init__(
        self,
        cache: Tensor,
        num_heads: int,
        specs: Sequence[AttentionSpec],
        max_seqs: int,
        *,
        max_prompt_rows: int = 0,
        max_prompts: int = 0,
        own_kernel: bool = True,
        prefetches: bool = True,
    ) -> None:
        kinds = list(dict.fromkeys(specs))
        self._num_heads = num_heads
        self._processors = int(torch.cuda.get_device_properties(cache.device).multi_processor_count)
        self.set_cache(cache)
        device, head_dim = cache.device, cache.size(-1)
        num_bytes = workspace_bytes(
            num_heads,
            cache.size(4),
            head_dim,
            self._processors,
            max_seqs=max_seqs,
            max_prompt_rows=max_prompt_rows,
            max_prompts=max_prompts,
        )
        workspace = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._kinds = [_Kind(spec, cache.dtype, head_dim, workspace) for spec in kinds]
        self._kind_of_layer = [self._kinds[kinds.index(spec)] for spec in specs]
        self._specs = tuple(specs)
        self._can_attend_whole = own_kernel and attends_whole(cache, num_heads)
        self._is_whole = False
        self._prefetches = prefetches
        self._batch: AttentionBatch | None = None

    def set_cache(self, cache: Tensor) -> None:
        """Use another cache of the same shape but for its number of blocks. No graph may have captured the old one."""
        self._cache = cache
        self._layers = [(cache[:, layer, 0], cache[:, layer, 1]) for layer in range(cache.size(1))]

    def wants_cut(self, batch: AttentionBatch) -> bool:
        """Whether decode rows are faster with their contexts cut in pieces, whose results are merged afterwards.

        Not if every context is short, nor if the longest takes no more than its share of these rows' work. Prompts
        beside them do not count: they are attended by a launch of their own.
        """
        if batch.decode is None:
            return True
        blocks = np.diff(batch.decode.host_kv_indptr)
        share = int(blocks.sum()) * self._cache.size(4) / (2 * self._processors)
        tokens = OWN_UNCUT_TOKENS if self._can_attend_whole else UNCUT_TOKENS
        return bool(blocks.max() > max(tokens // self._cache.size(3), UNCUT_SHARE * share))

    def begin(self, batch: AttentionBatch, cut: bool = True) -> None:
        """Plan a step and send the plan to the device, without waiting for it.

        cut: contexts of decode rows may be cut in pieces.
        """
        self._batch = batch
        self._is_whole = self._can_attend_whole and not cut
        sizes = (self._num_heads, self._cache.size(4), self._cache.size(3), self._cache.size(5))
        for kind in self._kinds:
            if batch.decode is not None and not self._is_whole:
                kind.decode.plan(batch.decode, batch.in_graph, cut, *sizes)
            if batch.prompts is not None:
                kind.prompts.plan(batch.prompts, batch.in_graph, True, *sizes)

    def compute(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ops.kv_append(self._cache, key, value, self._running.kv_slots, layer)
        return self.attend(layer, query)

    def compute_rotary(self, layer: int, qkv: Tensor, cos: Tensor, sin: Tensor, soon: Tensor) -> Tensor:
        query = torch.empty(qkv.size(0), self._num_heads, self._cache.size(5), dtype=qkv.dtype, device=qkv.device)
        asked = soon if self._prefetches else None
        ops.rotary_append(query, self._cache, qkv, cos, sin, self._running.kv_slots, layer, soon=asked)
        return self.attend(layer, query)

    def attend(self, layer: int, query: Tensor) -> Tensor:
        """query: [T, H, D] → [T, H, D], over what the cache holds."""
        batch, out = self._running, torch.empty_like(query)
        kind, cache = self._kind_of_layer[layer], self._layers[layer]
        if batch.decode is not None:
            rows = batch.decode.rows
            if self._is_whole:
                self._attend_whole(batch.decode, batch.kv_indices, layer, query[rows], out[rows])
            else:
                kind.decode.run(batch.decode, batch.kv_indices, query[rows], *cache, out[rows])
        if batch.prompts is not None:
            rows = batch.prompts.rows
            kind.prompts.run(batch.prompts, batch.kv_indices, query[rows], *cache, out[rows])
        return out

    def _attend_whole(self, lane: Lane, kv_indices: Tensor, layer: int, query: Tensor, out: Tensor) -> None:
        spec = self._specs[layer]
        ops.decode_attention(
            out,
            query,
            self._cache,
            lane.kv_indptr,
            kv_indices,
            lane.last_block_len,
            layer,
            spec.scaling,
            window=spec.window or 0,
            softcap=spec.softcap or 0.0,
        )

    @property
    def _running(self) -> AttentionBatch:
        assert self._batch is not None, "no step was begun"
        return self._batch


def workspace_bytes(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    processors: int,
    *,
    max_seqs: int,
    max_prompt_rows: int = 0,
    max_prompts: int = 0,
) -> int:
    """For the partial outputs of contexts cut in pieces: a tile for each of the blocks that a launch may have.

    A launch that is no graph's has as many as the processors take at once. A graph's has all tiles that its rows may be
    cut into, and one more for each sequence, whose last tile may not be full.
    """
    group = num_heads // num_kv_heads
    pieces = -(-2 * processors // num_kv_heads)
    decode_tile = 16 if group <= 16 else 64 if group <= 64 else _PROMPT_TILE
    decode_tiles = max(pieces, -(-max_seqs * group // decode_tile) + max_seqs)
    prompt_tiles = max(pieces, -(-max_prompt_rows * group // _PROMPT_TILE) + max_prompts)
    tile_rows = max(decode_tiles * decode_tile, prompt_tiles * _PROMPT_TILE)
    return num_heads * (head_dim + 1) * 4 * tile_rows + (1 << 20)


class _Kind:
    """Layers that attend alike: one compiled module, and the plans of the running step's lanes."""

    def __init__(self, spec: AttentionSpec, dtype: torch.dtype, head_dim: int, workspace: Tensor) -> None:
        module = _module(dtype, head_dim, spec.window is not None, spec.softcap is not None)
        self.decode = _PlannedLane(spec, module, workspace)
        self.prompts = _PlannedLane(spec, module, workspace)


class _PlannedLane:
    """The plan of one lane of the running step. workspace: shared by all, since they run one after another."""

    def __init__(self, spec: AttentionSpec, module: Any, workspace: Tensor) -> None:
        self._spec = spec
        self._module = module
        self._workspace = workspace
        self._int_workspace = torch.zeros(_INT_WORKSPACE_BYTES, dtype=torch.uint8, device=workspace.device)
        self._pinned = PinnedRing(_INT_WORKSPACE_BYTES, workspace.device)
        self._dependent_launch = torch.cuda.get_device_capability(workspace.device) >= (9, 0)
        self._plan: Any = None

    @property
    def _window_left(self) -> int:
        return -1 if self._spec.window is None else self._spec.window - 1

    def plan(
        self,
        lane: Lane,
        in_graph: bool,
        cut: bool,
        num_heads: int,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
    ) -> None:
        pinned = self._pinned.take()
        # A graph may have more blocks than pieces of work; uncut ones do not know, so they repeat the first piece.
        pinned[:_WORK_LIST_BYTES].zero_()
        kv_indptr = torch.from_numpy(lane.host_kv_indptr)
        self._plan = self._module.plan(
            self._workspace,
            self._int_workspace,
            pinned,
            torch.from_numpy(lane.host_qo_indptr),
            kv_indptr,
            kv_indptr,  # lengths in tokens, which this kernel does not read
            lane.num_rows,
            lane.num_seqs,
            num_heads,
            num_kv_heads,
            block_size,
            in_graph,
            head_dim,
            head_dim,
            True,  # causal
            self._window_left,
            -1,  # pieces of any size
            not cut,
            0,  # no blocks of other kernels beside it
        )
        self._pinned.sent()

    def run(self, lane: Lane, kv_indices: Tensor, query: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        self._module.paged_run(
            self._workspace,
            self._int_workspace,
            self._plan,
            query,
            keys,
            values,
            lane.qo_indptr,
            lane.kv_indptr,
            kv_indices,
            lane.last_block_len,
            out,
            None,  # no log-sum-exp
            _MASK_NONE if lane.num_rows == lane.num_seqs else _MASK_CAUSAL,
            _LAYOUT_NHD,
            self._window_left,
            self._dependent_launch,
            *(None,) * 6,  # no mask, slopes or items of its own
            self._spec.softcap or 0.0,
            self._spec.scaling,
            1.0,  # RoPE is the model's
            1.0,
            0,
        )


def _module(dtype: torch.dtype, head_dim: int, has_window: bool, has_softcap: bool) -> Any:
    """The compiled kernels; compiled on first use (tens of seconds) and kept on disk by FlashInfer.

    Raises ConfigError when FlashInfer is not installed or cannot compile.
    """
    try:
        from flashinfer.jit.attention import gen_batch_prefill_module
    except ImportError as error:
        raise ConfigError(
            f"Serving on a GPU needs FlashInfer, which cannot be imported ({error}). In Punica's checkout: "
            f"{how_to_install('gpu')}. Or serve on the CPU: --device cpu."
        ) from error
    sizes = (torch.int32, head_dim, head_dim, _NO_POSITION_ENCODING, has_window, has_softcap, False)
    try:
        return gen_batch_prefill_module("fa2", dtype, dtype, dtype, *sizes).build_and_load()
    except RuntimeError as error:
        raise ConfigError(
            f"FlashInfer could not compile its attention kernels; they need the CUDA toolkit's nvcc and ninja. {error}"
        ) from error
