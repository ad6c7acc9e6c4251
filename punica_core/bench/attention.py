"""Benchmark of decode attention: ``python -m punica_core.bench.attention --output DIR``.

Shapes of Llama-3.1-8B: 32 query heads, 8 KV heads, head dim 128, bf16, blocks of 16 tokens anywhere in the cache. Times
are microseconds that attention adds to a chain of a small kernel and the append of keys and values before it, in a CUDA
graph whose layers rotate through more memory than the L2 cache holds. TB/s are the keys and values over that time. A
variant that fails is reported and left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from punica_core import ops
from punica_core.bench.lora_cases import time_graph_us
from punica_core.config import BLOCK_SIZE
from punica_core.model.attention import AttentionSpec
from punica_core.model.attention_op import AttentionBatch, Lane
from punica_core.model.flashinfer import FlashInferAttention
from punica_core.ops import cuda, reference
from punica_core.stdout import until_unread

HEADS: Final = 32
KV_HEADS: Final = 8
HEAD_DIM: Final = 128
BATCHES: Final = (1, 8, 32, 64, 128)
CONTEXTS: Final = (150, 200, 500, 2000)

_BYTES_A_TOKEN: Final = 2 * KV_HEADS * HEAD_DIM * 2
_ROTATED_BYTES: Final = 256 << 20
_MAX_LAYERS: Final = 256
_SPEC: Final = AttentionSpec(HEAD_DIM**-0.5)
_WORKSPACE_BYTES: Final = 256 << 20
_SHARED_BYTES: Final = 8 << 20
_CTA_TILE: Final = 3
"""Place of the rows of query tiles in a plan of FlashInfer's prompt kernel."""


@dataclass(frozen=True)
class Sizes:
    """A decode step: B sequences of `context` tokens each."""

    batch: int
    context: int

    @property
    def blocks_each(self) -> int:
        return -(-self.context // BLOCK_SIZE)

    @property
    def kv_bytes(self) -> int:
        """Keys and values of one layer."""
        return self.batch * self.context * _BYTES_A_TOKEN

    @property
    def layers(self) -> int:
        """As many as make the keys and values outgrow the L2 cache."""
        return min(max(2, -(-_ROTATED_BYTES // self.kv_bytes)), _MAX_LAYERS)

    @property
    def elements(self) -> int:
        """Of the cache."""
        return self.batch * self.blocks_each * self.layers * BLOCK_SIZE * _BYTES_A_TOKEN // 2


class Case:
    """The tensors of a decode step. pool: random bf16 numbers, as many as the largest case needs."""

    def __init__(self, sizes: Sizes, pool: Tensor) -> None:
        self.sizes = sizes
        device, batch, each = pool.device, sizes.batch, sizes.blocks_each
        shape = (batch * each, sizes.layers, 2, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
        self.cache = pool[: sizes.elements].view(shape)
        generator = torch.Generator().manual_seed(0)
        indices = torch.randperm(batch * each, generator=generator)
        qo_indptr, kv_indptr = np.arange(batch + 1, dtype=np.int32), np.arange(batch + 1, dtype=np.int32) * each
        last_len = (sizes.context - 1) % BLOCK_SIZE + 1
        self.lane = Lane(
            slice(0, batch),
            qo_indptr,
            kv_indptr,
            torch.from_numpy(qo_indptr).to(device),
            torch.from_numpy(kv_indptr).to(device),
            torch.full((batch,), last_len, dtype=torch.int32, device=device),
        )
        last = indices.view(batch, each)[:, -1]
        self.attention_batch = AttentionBatch(
            self.lane,
            None,
            indices.to(device, torch.int32),
            (last * BLOCK_SIZE + last_len - 1).to(device, torch.int32),
            in_graph=True,
            kv_rows=(),
        )
        self.qkv = torch.randn(batch, (HEADS + 2 * KV_HEADS) * HEAD_DIM, dtype=pool.dtype, device=device)
        self.cos, self.sin = torch.randn(2, batch, HEAD_DIM, dtype=pool.dtype, device=device)
        self.query = torch.empty(batch, HEADS, HEAD_DIM, dtype=pool.dtype, device=device)

    def append(self, call: int) -> None:
        """What comes before attention: a kernel that nobody runs beside, and the append."""
        self.qkv.mul_(1.0)
        arguments = (self.qkv, self.cos, self.sin, self.attention_batch.kv_slots, call % self.sizes.layers)
        ops.rotary_append(self.query, self.cache, *arguments)

    def flashinfer(self, *, own_kernel: bool) -> FlashInferAttention:
        specs = [_SPEC] * self.sizes.layers
        return FlashInferAttention(self.cache, HEADS, specs, self.sizes.batch, own_kernel=own_kernel)

    def wanted(self, layer: int) -> Tensor:
        """fp32, by the reference."""
        batch, out = self.attention_batch, torch.empty_like(self.query, dtype=torch.float32)
        cache = self.cache[:, layer : layer + 1].float().contiguous()
        tables = (self.lane.kv_indptr, batch.kv_indices, self.lane.last_block_len)
        reference.decode_attention(out, self.query.float(), cache, *tables, 0, _SPEC.scaling)
        return out


Attend = Callable[[int], Tensor]
"""Attention over one layer; the query is the case's."""


def _engine(case: Case, *, own_kernel: bool, cut: bool) -> Attend:
    attention = case.flashinfer(own_kernel=own_kernel)
    attention.begin(case.attention_batch, cut)
    return lambda layer: attention.attend(layer, case.query)


def _workspaces(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """What FlashInfer's plans need; the last one, which is page-locked, until the plan is on the device."""
    return (
        torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device),
        torch.zeros(_SHARED_BYTES, dtype=torch.uint8, device=device),
        torch.zeros(_SHARED_BYTES, dtype=torch.uint8, pin_memory=True),
    )


def _prompt_kernel(case: Case, *, split_blocks: int = -1, cta_tile: int | None = None) -> Attend:
    """FlashInfer's prompt kernel, planned for exactly this batch.

    split_blocks: of the pieces that contexts are cut into, 0 for none, -1 as its planner thinks. cta_tile: rows of a
    tile of queries.
    """
    from flashinfer.jit.attention import gen_batch_prefill_module

    dtype, lane = case.query.dtype, case.lane
    sizes = (torch.int32, HEAD_DIM, HEAD_DIM, 0, False, False, False)
    module = gen_batch_prefill_module("fa2", dtype, dtype, dtype, *sizes).build_and_load()
    *buffers, pinned = _workspaces(case.query.device)
    kv_indptr = torch.from_numpy(lane.host_kv_indptr)
    heads = (HEADS, KV_HEADS, BLOCK_SIZE)
    plan = module.plan(
        *buffers,
        pinned,
        torch.from_numpy(lane.host_qo_indptr),
        kv_indptr,
        kv_indptr,
        *(lane.num_rows, lane.num_seqs, *heads),
        *(False, HEAD_DIM, HEAD_DIM, True, -1, max(split_blocks, -1) or -1, split_blocks == 0, 0),
    )
    torch.cuda.synchronize()
    if cta_tile is not None:
        plan = [cta_tile if place == _CTA_TILE else int(value) for place, value in enumerate(plan)]
    tables = (lane.qo_indptr, lane.kv_indptr, case.attention_batch.kv_indices, lane.last_block_len)
    options = (0, 0, -1, True, *(None,) * 6, 0.0, _SPEC.scaling, 1.0, 1.0, 0)

    def attend(layer: int) -> Tensor:
        out, halves = torch.empty_like(case.query), (case.cache[:, layer, 0], case.cache[:, layer, 1])
        module.paged_run(*buffers, plan, case.query, *halves, *tables, out, None, *options)
        return out

    return attend


def _decode_kernel(case: Case) -> Attend:
    """FlashInfer's decode kernel, without tensor cores."""
    from flashinfer.jit.attention import gen_batch_decode_module

    dtype, lane = case.query.dtype, case.lane
    sizes = (dtype, dtype, dtype, torch.int32, HEAD_DIM, HEAD_DIM, 0, False, False)
    module = gen_batch_decode_module(*sizes).build_and_load()
    *buffers, pinned = _workspaces(case.query.device)
    empty = torch.empty(0, dtype=dtype, device=case.query.device)
    plan = module.plan(
        *buffers,
        pinned,
        torch.from_numpy(lane.host_kv_indptr),
        *(lane.num_seqs, HEADS, KV_HEADS, BLOCK_SIZE, False, -1, 0.0, HEAD_DIM, HEAD_DIM),
        *(empty, empty),
    )
    torch.cuda.synchronize()
    tables = (lane.kv_indptr, case.attention_batch.kv_indices, lane.last_block_len)
    options = (0, -1, True, None, 0.0, _SPEC.scaling, 1.0, 1.0)

    def attend(layer: int) -> Tensor:
        out, halves = torch.empty_like(case.query), (case.cache[:, layer, 0], case.cache[:, layer, 1])
        module.run(*buffers, plan, case.query, *halves, *tables, out, None, *options)
        return out

    return attend


def _xqa(case: Case) -> Attend:
    """TensorRT-LLM's decode kernel, out of FlashInfer."""
    from flashinfer.xqa import xqa

    device, sizes = case.query.device, case.sizes
    table = case.attention_batch.kv_indices.view(sizes.batch, sizes.blocks_each)
    lengths = torch.full((sizes.batch, 1), sizes.context, dtype=torch.int32, device=device).view(torch.uint32)
    workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    semaphores = torch.zeros(_SHARED_BYTES // 4, dtype=torch.int32, device=device).view(torch.uint32)

    def attend(layer: int) -> Tensor:
        out = torch.empty_like(case.query)
        xqa(
            case.query[:, None],
            case.cache[:, layer, 0],
            case.cache[:, layer, 1],
            table,
            lengths,
            out[:, None],
            workspace,
            semaphores,
            KV_HEADS,
            BLOCK_SIZE,
        )
        return out

    return attend


VARIANTS: Final[dict[str, Callable[[Case], Attend]]] = {
    "own": lambda case: _engine(case, own_kernel=True, cut=False),
    "whole": lambda case: _engine(case, own_kernel=False, cut=False),
    "cut": lambda case: _engine(case, own_kernel=False, cut=True),
    "exact": _prompt_kernel,
    "split 4": lambda case: _prompt_kernel(case, split_blocks=4),
    "split 8": lambda case: _prompt_kernel(case, split_blocks=8),
    "split 16": lambda case: _prompt_kernel(case, split_blocks=16),
    "tile 64": lambda case: _prompt_kernel(case, split_blocks=0, cta_tile=64),
    "decode": _decode_kernel,
    "xqa": _xqa,
}
"""own: `ops.decode_attention`. whole, cut: the engine's calls of FlashInfer's prompt kernel in a graph. exact, split N,
tile: the same kernel with plans for this batch alone. decode: its kernel without tensor cores. xqa: compiles a minute;
not timed unless asked for."""


def measure(case: Case, attend: Attend, baseline_us: float) -> dict[str, float]:
    """us that attention adds; TB/s; error: ‖out - reference‖ / ‖reference‖."""
    case.append(0)
    out, wanted = attend(0).float(), case.wanted(0)
    error = float((out - wanted).norm() / wanted.norm())

    def step(call: int) -> None:
        case.append(call)
        attend(call % case.sizes.layers)

    us = time_graph_us(step, calls_of(case)) - baseline_us
    return {"us": round(us, 2), "tb_s": round(case.sizes.kv_bytes / us / 1e6, 2), "error": round(error, 5)}


def calls_of(case: Case) -> int:
    """Of a graph: each layer once, or several times if they are few."""
    return max(case.sizes.layers, 32)


def baseline_us(case: Case) -> float:
    """Of what comes before attention; the median of three, as it is taken off every variant."""
    return statistics.median(time_graph_us(case.append, calls_of(case)) for _ in range(3))


def measure_case(case: Case, variants: Sequence[str]) -> dict[str, Any]:
    """Each variant's numbers, or what it said when it failed."""
    base = baseline_us(case)
    row: dict[str, Any] = {"batch": case.sizes.batch, "context": case.sizes.context, "before_us": round(base, 2)}
    for name in variants:
        try:
            row[name] = measure(case, VARIANTS[name](case), base)
        except (RuntimeError, TypeError, ValueError, AttributeError, ImportError) as error:
            row[name] = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]}
    return row


def cases() -> Iterator[Sizes]:
    for batch in BATCHES:
        for context in CONTEXTS:
            yield Sizes(batch, context)


def describe(row: dict[str, Any], variants: Sequence[str]) -> str:
    """One line: µs (TB/s) of each variant."""
    cells = []
    for name in variants:
        cell = row[name]
        cells.append("failed" if "failed" in cell else f"{cell['us']:.1f} ({cell['tb_s']:.2f})")
    return f"{row['batch']:>5} {row['context']:>7}  " + "".join(f"{cell:>15}" for cell in cells)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line of the module."""
    parser = argparse.ArgumentParser(prog="python -m punica_core.bench.attention", description=__doc__.splitlines()[0])
    parser.add_argument("--variants", default=",".join(name for name in VARIANTS if name != "xqa"))
    parser.add_argument("--output", type=Path, help="directory for attention.json")
    args = parser.parse_args(argv)
    variants = args.variants.split(",")
    if unknown := set(variants) - set(VARIANTS):
        parser.error(f"unknown variants {', '.join(sorted(unknown))}; there are {', '.join(VARIANTS)}")
    cuda.load()
    start = time.monotonic()
    pool = torch.randn(max(sizes.elements for sizes in cases()), dtype=torch.bfloat16, device="cuda")
    print("batch context  " + "".join(f"{name:>15}" for name in variants))
    rows = []
    with torch.inference_mode():
        for sizes in cases():
            rows.append(measure_case(Case(sizes, pool), variants))
            print(describe(rows[-1], variants), flush=True)
    problems = {name: row[name]["failed"] for row in rows for name in variants if "failed" in row[name]}
    for name, problem in problems.items():
        print(f"{name}: {problem}")
    errors = {name: max((row[name]["error"] for row in rows if "error" in row[name]), default=0.0) for name in variants}
    print("largest errors: " + ", ".join(f"{name} {error:.2g}" for name, error in errors.items()))
    print(f"{time.monotonic() - start:.0f} s, on {torch.cuda.get_device_name()}")
    if args.output is not None:
        args.output.mkdir(parents=True, exist_ok=True)
        document = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
        (args.output / "attention.json").write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(until_unread(main))
