"""Benchmark of choosing tokens: ``python -m punica_core.bench.sampling --output DIR``.

Device times are microseconds of one call in a CUDA graph of 20, median of several replays, with logits left in the L2
cache as far as they fit, as after the base product that makes them. ``floor`` is the logits' bytes over 4.18 TB/s. Host
times are microseconds of `DeviceSampler.launch` on the calling thread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from punica_core.bench.lora_cases import FLOOR_BYTES_PER_US, time_graph_us
from punica_core.engine.device_sampler import DeviceSampler
from punica_core.ops import cuda
from punica_core.ops.sample import greedy_tokens, pack_rows, rows_words, sample_tokens
from punica_core.protocol import NewSequence, SamplingParams
from punica_core.scheduler.plan import BASE_SLOT, RowPlan
from punica_core.scheduler.sequence import Sequence as ScheduledSequence
from punica_core.stdout import until_unread

KINDS: Final[dict[str, dict[str, Any]]] = {
    "greedy": {},
    "drawn": {"temperature": 1.0},
    "top_p": {"temperature": 0.8, "top_p": 0.95},
    "top_k": {"temperature": 1.0, "top_k": 50},
    "all": {"temperature": 0.7, "top_k": 200, "top_p": 0.9, "min_p": 0.01},
    "flat": {"temperature": 100.0, "top_p": 0.95},
}
VOCAB_SIZES: Final = (49152, 128256, 262144)
BATCHES: Final = (1, 8, 64, 128, 256)
_CALLS: Final = 20


def measure_kernels() -> list[dict[str, Any]]:
    """Device times of the two ops by dtype, vocabulary, rows and parameters."""
    rows = []
    for dtype in (torch.bfloat16, torch.float32):
        for vocab_size in VOCAB_SIZES:
            for batch in BATCHES:
                row: dict[str, Any] = {"dtype": str(dtype).removeprefix("torch."), "vocab": vocab_size, "rows": batch}
                row |= _point(dtype, vocab_size, batch)
                rows.append(row)
                print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    return rows


def _point(dtype: torch.dtype, vocab_size: int, batch: int) -> dict[str, float]:
    generator = torch.Generator("cuda").manual_seed(0)
    logits = (torch.randn(batch, vocab_size, generator=generator, device="cuda") * 3).to(dtype)
    token_ids = torch.empty(batch, dtype=torch.int64, device="cuda")
    finite = torch.empty(batch, dtype=torch.bool, device="cuda")
    point = {"floor": round(logits.nbytes / FLOOR_BYTES_PER_US, 1)}
    for kind, params in KINDS.items():
        records = pack_rows([SamplingParams(max_tokens=1, **params)] * batch)
        records["point"] = np.random.default_rng(0).random(batch)
        words = torch.from_numpy(rows_words(records)).cuda()

        def call(_: int, words: torch.Tensor = words, greedy: bool = kind == "greedy") -> None:
            if greedy:
                greedy_tokens(token_ids, finite, logits)
            else:
                sample_tokens(token_ids, finite, logits, words)

        point[kind] = round(time_graph_us(call, _CALLS), 1)
    point["torch_argmax"] = round(time_graph_us(lambda _: logits.argmax(dim=-1), _CALLS), 1)
    return point


def measure_host(vocab_size: int = 128256) -> list[dict[str, Any]]:
    """Host times of a launch: greedy rows, drawn rows of the step before, rows that changed, rows with edits."""
    rows = []
    for batch in (1, 64, 256):
        logits = torch.randn(batch, vocab_size, device="cuda", dtype=torch.bfloat16)
        steady = _plan_rows(batch, temperature=1.0)
        row: dict[str, Any] = {
            "rows": batch,
            "greedy": _host_us(logits, [_plan_rows(batch)]),
            "drawn": _host_us(logits, [steady]),
            "drawn, other rows": _host_us(logits, [steady, _plan_rows(batch, temperature=1.0)]),
            "penalties": _host_us(logits, [_plan_rows(batch, temperature=1.0, presence_penalty=0.5)]),
            "logprobs": _host_us(logits, [_plan_rows(batch, logprobs=5)]),
        }
        rows.append(row)
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    return rows


def _plan_rows(batch: int, **sampling: Any) -> list[RowPlan]:
    params = SamplingParams(max_tokens=1000, **sampling)
    prompt = list(range(100))
    sequences = (
        ScheduledSequence.of(NewSequence(request_id=i, prompt_ids=prompt, sampling=params), 0.0) for i in range(batch)
    )
    return [RowPlan(sequence, len(prompt) - 1, 1, (), BASE_SLOT, samples=True) for sequence in sequences]


def _host_us(logits: torch.Tensor, steps: Sequence[list[RowPlan]], launches: int = 40) -> float:
    """Median over launches that take turns through `steps`."""
    sampler = DeviceSampler(logits.size(1), [0], seed=0)
    times = []
    for index in range(launches):
        begin = time.perf_counter()
        pending = sampler.launch(logits, steps[index % len(steps)])
        times.append((time.perf_counter() - begin) * 1e6)
        pending.result()
    return round(statistics.median(times[5:]), 1)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line of the module."""
    parser = argparse.ArgumentParser(prog="python -m punica_core.bench.sampling", description=__doc__)
    parser.add_argument("--library", type=Path, help="compiled kernels; default: prebuilt or built on the spot")
    parser.add_argument("--output", type=Path, default=Path("benchmarks"), help="directory of sampling.json")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("the sampling benchmark needs an NVIDIA GPU; torch sees none", file=sys.stderr)
        return 1
    cuda.load(args.library)
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    with torch.inference_mode():
        result["host"] = measure_host()
        result["kernels"] = measure_kernels()
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "sampling.json").write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(until_unread(main))
