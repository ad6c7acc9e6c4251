"""Which kernel attends decode rows beside prompts, and that it is right whichever it is; plain torch stands in for the
compiled kernels, and what was to be captured is run anew."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from punica_core import ops
from punica_core.engine import device_runner
from punica_core.engine.graphs import GraphKey, GraphSizes, mixed_sizes
from punica_core.engine.step_batch import BatchSizes
from punica_core.lora.table_step import LoRAOrder
from punica_core.model import flashinfer
from punica_core.scheduler.sequence import Sequence as Running
from tests.support.driven_device_runner import DrivenDeviceRunner
from tests.support.driven_runner import DrivenRunner, random_prompt

TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}
MIXED = GraphSizes(decode=(2, 8), mixed=(0, 8), prompt_rows=(64,), whole_mixed=True)
PIECES_ONLY = GraphSizes(decode=(2, 8), mixed=(0, 8), prompt_rows=(64,))
DECODING, ARRIVING = (5, 40, 17), (30, 12)
"""Tokens of the prompts of sequences that decode, and of those that arrive beside them."""


class TorchModule:
    """FlashInfer's compiled kernels in plain torch. attended: rows of each launch, and whether it was planned uncut."""

    def __init__(self) -> None:
        self.attended: list[tuple[int, bool]] = []

    def plan(self, *arguments: Any) -> bool:
        return bool(arguments[-2])

    def paged_run(self, workspace: Tensor, ints: Tensor, uncut: bool, query: Tensor, *arguments: Any) -> None:
        keys, values, qo_indptr, kv_indptr, kv_indices, last_block_len, out, *rest = arguments
        self.attended.append((len(query), uncut))
        scaling, group = rest[-4], query.size(1) // keys.size(2)
        for seq, (first, end) in enumerate(zip(qo_indptr.tolist(), qo_indptr[1:].tolist(), strict=False)):
            if first == end:
                continue
            blocks = kv_indices[int(kv_indptr[seq]) : int(kv_indptr[seq + 1])].long()
            length = (len(blocks) - 1) * keys.size(1) + int(last_block_len[seq])
            k, v = (half[blocks].flatten(0, 1)[:length].repeat_interleave(group, 1) for half in (keys, values))
            scores = torch.einsum("qhd,khd->hqk", query[first:end], k) * scaling
            later = torch.ones(end - first, length, dtype=torch.bool).triu(length - (end - first) + 1)
            out[first:end] = torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -torch.inf).softmax(-1), v)


class Replays:
    """Stands in for `StepGraphs`: a captured step is run again over the tables that it was captured with."""

    def __init__(self, sizes: GraphSizes, logits: Tensor) -> None:
        self.sizes = sizes
        self.runs: dict[GraphKey, Callable[[], Tensor]] = {}
        self.replayed: list[GraphKey] = []

    def capture(self, key: GraphKey, run: Callable[[], Tensor]) -> None:
        self.runs[key] = run

    def replay(self, key: GraphKey) -> Tensor:
        self.replayed.append(key)
        return self.runs[key]()


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> TorchModule:
    stand_in = TorchModule()
    monkeypatch.setattr(flashinfer, "_module", lambda *arguments: stand_in)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(device_runner, "StepGraphs", Replays)
    return stand_in


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each launch of our own kernel."""
    launches: list[int] = []
    compute = ops.decode_attention

    def counted(out: Tensor, *arguments: Any, **options: Any) -> None:
        launches.append(len(out))
        compute(out, *arguments, **options)

    monkeypatch.setattr(ops, "decode_attention", counted)
    return launches


def llama(head_dim: int) -> LlamaForCausalLM:
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "vocab_size": 512,
        "head_dim": head_dim,
    }
    torch.manual_seed(3)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=512)).eval()


def mixed_step(driven: DrivenRunner) -> Tensor:
    """Logits [5, V] of a step with three decode rows and two prompts."""
    sequences: list[Running] = [driven.sequence(random_prompt(n, 512, seed=n)) for n in DECODING + ARRIVING]
    driven.generate(sequences[:3], new_tokens=1)
    driven.step(sequences)
    return torch.stack([driven.logits_of(sequence)[-1] for sequence in sequences])


CASES = {
    "short": (MIXED, 64, 512, False),
    "long": (MIXED, 64, 32, True),
    "pieces only": (PIECES_ONLY, 64, 512, True),
    "wide heads": (PIECES_ONLY, 256, 512, True),
}
"""What is captured, head dim, the longest context that is surely not cut, and whether contexts are in pieces."""


@pytest.mark.parametrize(("graphs", "head_dim", "uncut", "cut"), CASES.values(), ids=CASES)
def test_a_captured_step_attends_its_decode_rows_by_the_kernel_for_their_lengths(
    module: TorchModule,
    own: list[int],
    monkeypatch: pytest.MonkeyPatch,
    graphs: GraphSizes,
    head_dim: int,
    uncut: int,
    cut: bool,
) -> None:
    monkeypatch.setattr(flashinfer, "OWN_UNCUT_TOKENS", uncut)
    expected = mixed_step(DrivenRunner(llama(head_dim)))
    driven = DrivenDeviceRunner(llama(head_dim), flashinfer=True, graphs=graphs)
    captured: Any = driven.runner.graphs
    assert {key.cut for key in captured.runs if key.sizes == mixed_sizes(8, 64)} == {True, not graphs.whole_mixed}
    found = mixed_step(driven)
    assert captured.replayed[-1] == GraphKey(mixed_sizes(8, 64), LoRAOrder.NONE, cut)
    assert own == ([] if cut else [8])
    assert module.attended == [(64, False), *([(8, False)] if cut else []), (64, False)]
    torch.testing.assert_close(found, expected, **TOLERANCE)
    assert not torch.allclose(found, expected.flip(0), **TOLERANCE)


EAGER = {
    "short": (64, 512, [3], []),
    "long": (64, 32, [], [(3, False)]),
    "wide heads": (256, 512, [], [(3, True)]),
}
"""Head dim, the longest context that is surely not cut, and launches for decode rows: our kernel's, FlashInfer's."""


@pytest.mark.parametrize(("head_dim", "uncut", "ours", "theirs"), EAGER.values(), ids=EAGER)
def test_so_does_a_step_that_is_not_captured(
    module: TorchModule,
    own: list[int],
    monkeypatch: pytest.MonkeyPatch,
    head_dim: int,
    uncut: int,
    ours: list[int],
    theirs: list[tuple[int, bool]],
) -> None:
    monkeypatch.setattr(flashinfer, "OWN_UNCUT_TOKENS", uncut)
    found = mixed_step(DrivenDeviceRunner(llama(head_dim), flashinfer=True))
    torch.testing.assert_close(found, mixed_step(DrivenRunner(llama(head_dim))), **TOLERANCE)
    assert own == ours
    assert module.attended == [(62, False), *theirs, (42, False)]


def test_what_padding_reads_reaches_no_row(module: TorchModule, own: list[int]) -> None:
    logits = []
    padding_block, read_block = 0, 15
    for spoiled in (None, padding_block, read_block):
        driven = DrivenDeviceRunner(llama(64), flashinfer=True, graphs=MIXED)
        sequences = [driven.sequence(random_prompt(n, 512, seed=n)) for n in DECODING + ARRIVING]
        assert sequences[1].block_table[0] == read_block
        driven.generate(sequences[:3], new_tokens=1)
        if spoiled is not None:
            driven.kv_cache[spoiled] = torch.nan
        driven.step(sequences)
        logits.append(torch.stack([driven.logits_of(sequence)[-1] for sequence in sequences]))
    assert own == [8] * 3
    assert torch.equal(logits[0], logits[1])
    assert logits[2].isnan().any(-1).tolist() == [False, True, False, False, False]


def test_sizes_of_a_mixed_step_hold_rows_of_padding() -> None:
    """What the tests above rely on."""
    assert MIXED.fit(len(DECODING), sum(ARRIVING), len(ARRIVING)) == mixed_sizes(8, 64)
    assert MIXED.fit(len(DECODING), 0, 0) == BatchSizes(8)
