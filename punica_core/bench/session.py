"""An engine in this process, driven as the worker's loop drives it, and what came out of it when."""

from __future__ import annotations

import argparse
import gc
import itertools
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, get_args

import torch

from punica_core.bench.shapes import linear_shapes, model_folder
from punica_core.bench.synthetic import SyntheticAdapters
from punica_core.config import Device, DType, EngineConfig, EngineLayout
from punica_core.engine.build import build_engine
from punica_core.engine.engine import Engine
from punica_core.protocol import AdapterRef, FinishReason, NewSequence, SamplingParams, SequenceOutput, StepStats

IDLE_WAIT: Final = 0.05
"""Seconds to sleep at most while nothing can run."""

ADAPTER_SLACK_BYTES: Final = 64 << 20
PRELOAD_AT_ONCE: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoice:
    """What engine to measure. num_adapters: made in memory, of these lora_ranks in turn; 0: LoRA is off.

    kv_tokens 0: sized from free memory on a GPU, enough for all sequences on a CPU. target_step_ms: see `EngineConfig`;
    0 where prompts are only there to be decoded behind.
    """

    model: str
    device: Device = "auto"
    dtype: DType = "auto"
    num_adapters: int = 0
    lora_ranks: tuple[int, ...] = (16,)
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    max_model_len: int = 2048
    target_step_ms: float = 0.0
    kv_tokens: int = 0
    seed: int = 0

    @property
    def is_on_gpu(self) -> bool:
        return self.device == "cuda" or (self.device == "auto" and torch.cuda.is_available())


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Flags for what `EngineChoice` holds, but for what a benchmark decides itself."""
    parser.add_argument("--model", default="llama-3.1-8b", help="a shape by name (random weights), or a model folder")
    parser.add_argument("--device", choices=get_args(Device), default="auto")
    parser.add_argument("--dtype", choices=get_args(DType), default="auto")
    parser.add_argument("--adapters", type=int, default=64, help="distinct adapters, made in memory (default: 64)")
    parser.add_argument("--lora-ranks", type=int_list, default=(16,), help="of the adapters, in turn (default: 16)")
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--kv-tokens", type=int, default=0, help="0: from free memory")
    parser.add_argument("--seed", type=int, default=0)


def int_list(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part.strip())


def name_list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


@dataclass(slots=True)
class Answer:
    """What became of a sequence. Times are seconds of `time.perf_counter`; times has one entry for each token."""

    request: NewSequence
    submitted: float
    token_ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    last: SequenceOutput | None = None

    @property
    def ttft(self) -> float:
        return self.times[0] - self.submitted

    @property
    def gaps(self) -> list[float]:
        """Seconds between consecutive tokens."""
        return [after - before for before, after in itertools.pairwise(self.times)]


class Session:
    """One engine for many points. Every sequence is to be ended before the next point begins."""

    def __init__(
        self, engine: Engine, layout: EngineLayout, wake: threading.Event, adapters: SyntheticAdapters
    ) -> None:
        self.layout = layout
        self.adapters = adapters
        self._engine = engine
        self._wake = wake
        self._ids = itertools.count(1)

    def request(
        self,
        prompt_ids: Sequence[int],
        max_tokens: int,
        adapter: AdapterRef | None = None,
        *,
        tenant: str = "",
        **sampling: Any,
    ) -> NewSequence:
        """A sequence that has not been submitted: greedy, and of exactly max_tokens tokens."""
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **sampling)
        return NewSequence(
            request_id=next(self._ids), prompt_ids=list(prompt_ids), sampling=params, adapter=adapter, tenant=tenant
        )

    def submit(self, requests: Iterable[NewSequence]) -> None:
        """Queue sequences. Raises RuntimeError if one of them can never run."""
        _raise_errors(self._engine.submit(requests, time.monotonic()))

    def step(self) -> list[SequenceOutput]:
        """One step of the engine, after a short sleep if nothing can run. Raises RuntimeError if a sequence fails."""
        self._wake.clear()
        outputs, executed = self._engine.step(time.monotonic())
        _raise_errors(outputs)
        if not executed:
            self._wake.wait(IDLE_WAIT)
        return outputs

    def run(self, requests: Sequence[NewSequence], at_once: int | None = None) -> list[Answer]:
        """Run sequences to their ends; the answers, in the same order. at_once: most of them in the engine at a time;
        the next one is submitted when one has ended."""
        waiting = iter(requests)
        answers: dict[int, Answer] = {}
        trace: list[tuple[float, list[SequenceOutput]]] = []
        self._admit(itertools.islice(waiting, at_once), answers)
        unfinished = len(answers)
        while unfinished:
            outputs = self.step()
            trace.append((time.perf_counter(), outputs))  # sorted out afterwards: this is the engine's thread
            ended = sum(output.finish_reason is not None for output in outputs)
            unfinished -= ended
            if at_once is not None and ended:
                before = len(answers)
                self._admit(itertools.islice(waiting, ended), answers)
                unfinished += len(answers) - before
        self.drain()
        for at, outputs in trace:
            for output in outputs:
                answer = answers[output.request_id]
                answer.token_ids += output.token_ids
                answer.times += [at] * len(output.token_ids)
                answer.last = output
        return [answers[request.request_id] for request in requests]

    def _admit(self, requests: Iterable[NewSequence], answers: dict[int, Answer]) -> None:
        admitted = list(requests)
        now = time.perf_counter()
        answers.update({request.request_id: Answer(request, now) for request in admitted})
        self.submit(admitted)

    def preload(self, refs: Iterable[AdapterRef]) -> float:
        """Bring adapters in by a short request each; seconds that took."""
        began = time.perf_counter()
        self.run([self.request([3 + (index % 7), 5, 8], 1, ref) for index, ref in enumerate(refs)], PRELOAD_AT_ONCE)
        return time.perf_counter() - began

    def cancel(self, requests: Iterable[NewSequence]) -> None:
        """End what runs, and wait for the device."""
        self._engine.cancel([request.request_id for request in requests], time.monotonic())
        self.drain()

    def drain(self) -> None:
        """Collect what is still in flight."""
        while self._engine.has_unfinished():
            self.step()

    def stats(self) -> StepStats:
        return self._engine.stats()

    def memory(self) -> dict[str, int]:
        """Bytes in use now, and the process's peak on the host."""
        stats = self.stats()
        found = {
            "adapter_host_bytes": stats.adapter_host_bytes_used,
            "adapter_gpu_bytes": stats.adapter_gpu_bytes_used,
            "kv_tokens": self.layout.num_blocks * self.layout.block_size,
            "base_bytes": self.layout.base_bytes,
            "host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        if self.layout.device.startswith("cuda"):
            free, total = torch.cuda.mem_get_info()
            found |= {"gpu_bytes": total - free, "gpu_peak_allocated_bytes": torch.cuda.max_memory_allocated()}
        return found


def _raise_errors(outputs: Iterable[SequenceOutput]) -> None:
    for output in outputs:
        if output.finish_reason is FinishReason.ERROR:
            raise RuntimeError(f"request {output.request_id} failed: {output.error_message}")


@contextmanager
def open_session(choice: EngineChoice) -> Iterator[Session]:
    """Build the engine, with adapters that are not loaded yet. Progress goes to stderr."""
    adapters = SyntheticAdapters(choice.num_adapters, choice.lora_ranks, seed=choice.seed)
    wake = threading.Event()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as room:
        folder = model_folder(choice.model, Path(room))
        config = engine_config(choice, folder, adapters)
        config.validate()
        engine, layout = build_engine(config, _shown(began), wake.set, open_adapter=adapters.open)
        _say(began, f"ready: {layout.num_blocks * layout.block_size} KV tokens on {layout.device}")
        gc.collect()
        gc.freeze()  # as a worker: no collection between two steps looks through the model
        try:
            yield Session(engine, layout, wake, adapters)
        finally:
            gc.unfreeze()


def engine_config(choice: EngineChoice, folder: Path, adapters: SyntheticAdapters) -> EngineConfig:
    """The engine's configuration: weights are read if the folder has any; memory for all adapters at once."""
    has_weights = any(folder.glob("*.safetensors"))
    is_fp32 = choice.dtype == "float32" or (choice.dtype == "auto" and not choice.is_on_gpu)
    itemsize = 4 if is_fp32 else 2
    nbytes = adapters.arena_bytes(linear_shapes(folder), itemsize) + ADAPTER_SLACK_BYTES if adapters.refs else 0
    on_cpu = choice.max_num_seqs * choice.max_model_len
    return EngineConfig(
        model=str(folder),
        device=choice.device,
        dtype=choice.dtype,
        load_format="auto" if has_weights else "dummy",
        lora=bool(adapters.refs),
        kv_tokens=choice.kv_tokens or (0 if choice.is_on_gpu else on_cpu),
        max_model_len=choice.max_model_len,
        max_num_seqs=choice.max_num_seqs,
        max_num_batched_tokens=choice.max_num_batched_tokens,
        target_step_ms=choice.target_step_ms,
        adapter_host_bytes=nbytes,
        adapter_gpu_bytes=nbytes if choice.is_on_gpu else 0,
        adapter_load_timeout=600.0,
        seed=choice.seed,
        log_level="warning",
    )


def _shown(began: float) -> Callable[[str, float], None]:
    seen: set[str] = set()

    def show(what: str, fraction: float) -> None:
        if what not in seen:
            seen.add(what)
            _say(began, what)

    return show


def _say(began: float, text: str) -> None:
    print(f"{time.perf_counter() - began:6.1f} s  {text}", file=sys.stderr, flush=True)
