"""How far adapters in 16 bit are from PEFT in fp32, beside how far PEFT in 16 bit is from itself there.

All rows read one stream of tokens, each from its start to an end of its own, so that what any adapter makes of a place
in it is known, and it can be told whether a row would pass with another's adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from punica_core.engine.graphs import GraphSizes
from punica_core.model.loader import prepare
from punica_core.scheduler.plan import BASE_SLOT
from tests.support.adapter_formats import Case, load_for
from tests.support.driven_device_runner import MAX_SEQS, DrivenDeviceRunner
from tests.support.driven_runner import random_prompt
from tests.support.numerics import relative_error
from tests.support.peft_adapters import peft_warnings_ignored, save_peft_adapter
from tests.support.peft_batch import adapted_model

BATCH = MAX_SEQS - 1
"""Adapters in a batch at most, beside a row of the base."""
NEW_TOKENS = 6
GRAPHS = GraphSizes((2, 8, 16), (0, 8, 16), (64, 256), whole_mixed=True)
LIMIT = 2.0

HALF_PRECISION = [
    ("cpu", torch.bfloat16),
    pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
    pytest.param("cuda", torch.float16, marks=pytest.mark.gpu),
]
"""Devices and the dtypes of 16 bits that they serve."""

Build = Callable[[], PreTrainedModel]


@dataclass(frozen=True)
class Precision:
    """|x − PEFT in fp32| / |PEFT in fp32| over the logits of the tokens behind a prompt.

    ours, theirs: of Punica and of PEFT, both in 16 bit on one device. effect: of the base without the adapter, in fp32.
    swapped: of Punica, against another adapter of the batch.
    """

    ours: float
    theirs: float
    effect: float
    swapped: float

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs

    @property
    def is_proven(self) -> bool:
        """Whether neither doing nothing nor doing what another adapter does would have passed."""
        return min(self.effect, self.swapped) > 2 * LIMIT * self.theirs


def stream(length: int, vocab_size: int) -> list[int]:
    """Has the tokens whose rows some adapters train (3, 5, 9) in every piece of four."""
    drawn = random_prompt(length, vocab_size)
    return [(3, 5, 9)[i // 4 % 3] if i % 4 == 0 else token for i, token in enumerate(drawn)]


def assert_precise(found: Mapping[Any, Precision]) -> None:
    """Fail for any that another's adapter would pass as, or that is further from fp32 than LIMIT times PEFT."""
    unproven = {case: precision for case, precision in found.items() if not precision.is_proven}
    assert unproven == {}, "the adapter does too little to prove anything"
    assert {case: precision for case, precision in found.items() if precision.ratio > LIMIT} == {}


def measure(
    build: Build,
    cases: Mapping[Any, Case],
    device: str,
    dtype: torch.dtype,
    root: Path,
    *,
    batches: Sequence[Sequence[Any]] | None = None,
    graphs: GraphSizes = GRAPHS,
) -> dict[Any, Precision]:
    """Of every case, by its key, prompts in chunks and decode steps; all by one runner.

    batches: the keys of those that are computed together, beside a row of the base; default: all. graphs: what is
    captured on a GPU; a CPU takes only the orders of kernels from it.
    """
    batches = [list(cases)] if batches is None else batches
    assert sorted(key for batch in batches for key in batch) == sorted(cases)
    assert max(map(len, batches)) <= BATCH
    folders = {
        key: save_peft_adapter(root / str(slot), build(), seed=slot, std=_std(case), dtype=case.dtype, **case.config)
        for slot, (key, case) in enumerate(cases.items())
    }
    ends = [8 + 4 * index for index in range(max(map(len, batches)) + 1)]
    tokens = stream(max(ends) + NEW_TOKENS, build().config.vocab_size)
    driven = _driven(build, list(folders.values()), device, dtype, graphs)
    base = _logits(build, None, tokens, device, dtype)
    pefts = {key: _logits(build, folder, tokens, device, dtype) for key, folder in folders.items()}
    slot_of = {key: slot for slot, key in enumerate(cases)}
    found = {}
    for batch in batches:
        driven.forget()
        ours = _forced(driven, [BASE_SLOT, *(slot_of[key] for key in batch)], tokens, ends[: len(batch) + 1])
        for index, key in enumerate(batch, start=1):
            place = slice(ends[index] - 1, ends[index] - 1 + NEW_TOKENS)
            other = pefts[batch[index % len(batch)]] if len(batch) > 1 else base
            exact, half = (logits[place] for logits in pefts[key])
            found[key] = Precision(
                ours=relative_error(ours[index], exact),
                theirs=relative_error(half, exact),
                effect=relative_error(base[0][place], exact),
                swapped=relative_error(ours[index], other[0][place]),
            )
        exact, half = (logits[ends[0] - 1 : ends[0] - 1 + NEW_TOKENS] for logits in base)
        assert relative_error(ours[0], exact) <= LIMIT * relative_error(half, exact), "the base's own row"
    return found


def _std(case: Case) -> float:
    """Of the numbers in A and B: so that s·BA is as large whatever its rank. Where an adapter drowns the base, an error
    of a last bit grows to anything from layer to layer, PEFT's too."""
    rank = int(case.config.get("r", 8))
    growth = rank if case.config.get("use_rslora") else rank**0.5
    return float(0.1 * (8**0.5 / growth) ** 0.5)


def _driven(
    build: Build, folders: list[Path], device: str, dtype: torch.dtype, graphs: GraphSizes
) -> DrivenDeviceRunner:
    loaded = prepare(build().to(device, dtype), Path("."), build().config.max_position_embeddings)
    if device == "cuda":
        torch.cuda.synchronize()  # gains are computed beside the stream that made the base
    adapters = {slot: load_for(loaded, folder) for slot, folder in enumerate(folders)}
    if device != "cuda":
        graphs = GraphSizes(inside_rows=graphs.inside_rows)
    return DrivenDeviceRunner(build().to(device, dtype), adapters, flashinfer=device == "cuda", graphs=graphs)


def _forced(driven: DrivenDeviceRunner, slots: list[int], tokens: list[int], ends: list[int]) -> list[Tensor]:
    """[NEW_TOKENS, V] of each row behind its prompt, which ends where `ends` says."""
    sequences = [driven.sequence(tokens[:end], slot) for slot, end in zip(slots, ends, strict=True)]
    driven.teacher_force(sequences, [tokens[end : end + NEW_TOKENS] for end in ends], budget=24)
    return [driven.logits_of(sequence).cpu() for sequence in sequences]


def _logits(
    build: Build, folder: Path | None, tokens: list[int], device: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """[T, V] of PEFT in fp32 on the CPU, and in 16 bit on the device."""
    model = adapted_model(folder, build)
    with peft_warnings_ignored(), torch.no_grad():
        exact = model(torch.tensor([tokens])).logits[0]
        half = model.to(device, dtype)(torch.tensor([tokens], device=device)).logits[0]
    return exact, half.float().cpu()
