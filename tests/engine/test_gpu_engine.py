"""The whole engine on the GPU: tiers, graphs, chunks, running ahead; against fp32 on the CPU and PEFT in 16 bits."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.config as compiler
from peft import PeftModel

from punica_core.config import EngineConfig
from punica_core.engine.build import build_engine
from punica_core.engine.engine import Engine
from punica_core.engine.forward import MOST_VERSIONS
from punica_core.lora.gpu_tier import GpuAdapterTier
from punica_core.lora.landing import LandingMemory
from punica_core.lora.packed import write_packed
from punica_core.lora.weights import load_adapter
from punica_core.model.shapes import model_shapes
from punica_core.protocol import AdapterRef, FinishReason, NewSequence, SamplingParams, SequenceOutput
from tests.support.driven_runner import random_prompt
from tests.support.peft_adapters import adapter_ref, edit_tensors, packed_ref, peft_warnings_ignored, save_peft_adapter
from tests.support.tiny_models import LONG_VOCAB_SIZE, long_llama

pytestmark = pytest.mark.gpu

NUM_ADAPTERS = 8
ADAPTER_BYTES = 300_000
"""More than any of the adapters takes, less than two of them together."""
DTYPES = [torch.bfloat16, torch.float16]


@pytest.fixture(scope="module", autouse=True)
def _fresh_compiler() -> Iterator[None]:
    """Engines have their layers' code in common, and each is compiled anew: as often as torch allows one engine, they
    may not suffice for all of them."""
    torch._dynamo.reset()
    with compiler.patch(recompile_limit=4 * MOST_VERSIONS):
        yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the base and the adapters 0 to 7."""
    folder = tmp_path_factory.mktemp("served")
    long_llama().save_pretrained(folder / "base")
    for index in range(NUM_ADAPTERS):
        rank = (4, 16, 8, 2)[index % 4]
        save_peft_adapter(folder / str(index), long_llama(), seed=index, std=0.1, r=rank, use_dora=index == 3)
    return folder


class Driver:
    """An engine, and what it has said of every sequence."""

    def __init__(self, root: Path, dtype: torch.dtype = torch.bfloat16, **config: Any) -> None:
        self.root = root
        chosen = EngineConfig(
            model=str(root / "base"),
            device="cuda",
            dtype=str(dtype).removeprefix("torch."),
            kv_tokens=40_000,
            max_num_seqs=16,
            seed=1,
            **config,
        )
        self.engine: Engine = build_engine(chosen, lambda what, fraction: None, lambda: None)[0]
        self.outputs: dict[int, list[SequenceOutput]] = {}

    def submit(self, prompt_ids: list[int], adapter: int | Path | None, **sampling: Any) -> int:
        """adapter: one of the folders by its number, or a packed file."""
        request_id = len(self.outputs)
        ref: AdapterRef | None = None
        if adapter is not None:
            ref = packed_ref(adapter) if isinstance(adapter, Path) else adapter_ref(self.root / str(adapter))
        params = SamplingParams(ignore_eos=True, **sampling)
        request = NewSequence(request_id=request_id, prompt_ids=prompt_ids, sampling=params, adapter=ref)
        self.outputs[request_id] = self.engine.submit([request], time.monotonic())
        return request_id

    def finish(self) -> None:
        while self.engine.has_unfinished():
            for output in self.engine.step(time.monotonic())[0]:
                self.outputs[output.request_id].append(output)

    def reason(self, request_id: int) -> FinishReason | None:
        return self.outputs[request_id][-1].finish_reason

    def generated(self, request_id: int) -> tuple[list[int], list[float]]:
        """(token ids, their log-probabilities)."""
        outputs = self.outputs[request_id]
        ids = [token_id for output in outputs for token_id in output.token_ids]
        return ids, [entry.logprob for output in outputs for entry in output.logprobs or []]

    def scored(self, request_id: int) -> list[float]:
        """Log-probabilities of the prompt's tokens but the first."""
        entries = next(output.prompt_logprobs for output in self.outputs[request_id] if output.prompt_logprobs)
        return list(entries.own)


@pytest.fixture(scope="module")
def drivers(root: Path) -> Callable[[torch.dtype], Driver]:
    """An engine for each dtype, with room for all adapters but not with a share of the GPU that leaves no other any."""

    def make(dtype: torch.dtype) -> Driver:
        return Driver(root, dtype, max_num_batched_tokens=512, adapter_gpu_bytes=64 << 20)

    return functools.cache(make)


@pytest.fixture
def driver(drivers: Callable[[torch.dtype], Driver]) -> Driver:
    return drivers(torch.bfloat16)


class References:
    """Log-probabilities by transformers and PEFT, by dtype and adapter."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._models: dict[tuple[int | None, torch.dtype], Any] = {}
        self._exact: dict[tuple[int | None, tuple[int, ...]], torch.Tensor] = {}

    def __call__(self, token_ids: list[int], adapter: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Of each token but the first, fp32 [T - 1]. Those of fp32 are kept: each dtype is held against them."""
        if dtype != torch.float32:
            return self._computed(token_ids, adapter, dtype)
        key = adapter, tuple(token_ids)
        if key not in self._exact:
            self._exact[key] = self._computed(token_ids, adapter, dtype)
        return self._exact[key]

    def _computed(self, token_ids: list[int], adapter: int | None, dtype: torch.dtype) -> torch.Tensor:
        device = "cpu" if dtype == torch.float32 else "cuda"
        if (adapter, dtype) not in self._models:
            model: Any = long_llama().to(device, dtype)
            if adapter is not None:
                with peft_warnings_ignored():
                    model = PeftModel.from_pretrained(model, self._root / str(adapter)).to(device, dtype).eval()
            self._models[adapter, dtype] = model
        with peft_warnings_ignored(), torch.no_grad():
            logits = self._models[adapter, dtype](torch.tensor([token_ids], device=device)).logits[0, :-1]
        picked = logits.float().log_softmax(-1).gather(-1, torch.tensor(token_ids[1:], device=device)[:, None])
        return picked.squeeze(-1).cpu()


@pytest.fixture(scope="module")
def references(root: Path) -> References:
    return References(root)


def check_near(
    found: Mapping[int | None, list[tuple[list[int], int, list[float]]]],
    references: References,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Of each adapter's (token ids, first scored, log-probabilities): no further from fp32 than twice PEFT in `dtype`,
    that of the engine."""
    ours = theirs = 0.0
    for adapter, parts in found.items():
        for token_ids, first, logprobs in parts:
            right = references(token_ids, adapter, torch.float32)[first - 1 :]
            peft = references(token_ids, adapter, dtype)[first - 1 :]
            ours += float((torch.tensor(logprobs) - right).square().sum())
            theirs += float((peft - right).square().sum())
    assert ours <= 4 * theirs, f"ours {ours**0.5:.4g}, PEFT's {theirs**0.5:.4g}"
    assert theirs > 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_long_prompts_in_chunks(
    drivers: Callable[[torch.dtype], Driver], dtype: torch.dtype, references: References
) -> None:
    driver = drivers(dtype)
    lengths = {None: (1, 129), 0: (16, 2000), 1: (128, 8000), 3: (127, 700), 5: (17,)}
    ids = {
        driver.submit(random_prompt(length, LONG_VOCAB_SIZE, seed=3), adapter, max_tokens=1, prompt_logprobs=0): adapter
        for adapter, each in lengths.items()
        for length in each
        if length > 1
    }
    driver.finish()
    found: dict[int | None, list[tuple[list[int], int, list[float]]]] = {}
    prompts = {length: random_prompt(length, LONG_VOCAB_SIZE, seed=3) for each in lengths.values() for length in each}
    for request_id, adapter in ids.items():
        scores = driver.scored(request_id)
        found.setdefault(adapter, []).append((prompts[len(scores) + 1], 1, scores))
    check_near(found, references, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_600_tokens_with_eight_adapters_and_the_base(
    drivers: Callable[[torch.dtype], Driver], dtype: torch.dtype, references: References
) -> None:
    driver = drivers(dtype)
    prompts = {
        adapter: random_prompt(20 + 7 * index, LONG_VOCAB_SIZE) for index, adapter in enumerate([None, *range(8)])
    }
    ids = {a: driver.submit(prompt, a, max_tokens=600, temperature=0.0, logprobs=0) for a, prompt in prompts.items()}
    driver.finish()
    found: dict[int | None, list[tuple[list[int], int, list[float]]]] = {}
    for adapter, request_id in ids.items():
        tokens, logprobs = driver.generated(request_id)
        assert len(tokens) == 600
        found[adapter] = [(prompts[adapter] + tokens, len(prompts[adapter]), logprobs)]
    check_near(found, references, dtype)


def test_adapters_of_embedding_and_head_beside_others(root: Path, driver: Driver, references: References) -> None:
    prompts = {adapter: random_prompt(30 + adapter, LONG_VOCAB_SIZE) for adapter in (0, 3, 9, 10, 11)}
    configs: dict[int, dict[str, Any]] = {
        9: {"target_modules": ["embed_tokens", "lm_head", "q_proj"], "use_dora": True},
        10: {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
        11: {
            "target_modules": ["q_proj"],
            "trainable_token_indices": {"embed_tokens": prompts[11][:3], "lm_head": [7]},
        },
    }
    for adapter, config in configs.items():
        save_peft_adapter(root / str(adapter), long_llama(), seed=adapter, std=0.1, **config)
    ids = {a: driver.submit(prompt, a, max_tokens=40, temperature=0.0, logprobs=0) for a, prompt in prompts.items()}
    scored = {a: driver.submit(prompt, a, max_tokens=1, prompt_logprobs=0) for a, prompt in prompts.items()}
    driver.finish()
    found: dict[int | None, list[tuple[list[int], int, list[float]]]] = {}
    for adapter, prompt in prompts.items():
        tokens, logprobs = driver.generated(ids[adapter])
        assert len(tokens) == 40
        found[adapter] = [(prompt + tokens, len(prompt), logprobs), (prompt, 1, driver.scored(scored[adapter]))]
    check_near(found, references)
    with pytest.raises(AssertionError, match="ours"):
        check_near({9: found[10]}, references)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_another_adapters_numbers_are_far_off(
    drivers: Callable[[torch.dtype], Driver], dtype: torch.dtype, references: References
) -> None:
    driver = drivers(dtype)
    prompt = random_prompt(60, LONG_VOCAB_SIZE)
    request_id = driver.submit(prompt, 0, max_tokens=1, prompt_logprobs=0)
    driver.finish()
    with pytest.raises(AssertionError, match="ours"):
        check_near({1: [(prompt, 1, driver.scored(request_id))]}, references, dtype)


def test_adapters_that_take_turns_in_a_small_tier_are_never_mixed_up(root: Path, references: References) -> None:
    driver = Driver(root, max_num_batched_tokens=256, adapter_gpu_bytes=3 * ADAPTER_BYTES)
    asked = []
    for turn in range(4):
        for adapter in range(NUM_ADAPTERS):
            prompt = random_prompt(10 + 9 * turn + adapter, LONG_VOCAB_SIZE, seed=turn)
            request = driver.submit(prompt, adapter, max_tokens=12, temperature=0.0, logprobs=0)
            asked.append((adapter, prompt, request))
    driver.finish()
    assert driver.engine.stats().adapter_evictions > 0
    found: dict[int | None, list[tuple[list[int], int, list[float]]]] = {}
    for adapter, prompt, request_id in asked:
        tokens, logprobs = driver.generated(request_id)
        assert len(tokens) == 12
        found.setdefault(adapter, []).append((prompt + tokens, len(prompt), logprobs))
    check_near(found, references)


def test_packed_adapters_take_turns_with_folders_in_a_small_tier(
    root: Path, tmp_path: Path, references: References
) -> None:
    """They are sent from where they were read, and leave their place there for one another."""
    shapes = model_shapes(long_llama())
    packed = {}
    for adapter in (0, 1, 2, 4, 5, 6):
        dtype = (torch.bfloat16, torch.float32)[adapter % 2]
        packed[adapter] = tmp_path / f"{adapter}.punica"
        weights = load_adapter(adapter_ref(root / str(adapter)), shapes, dtype, 256)
        write_packed(str(packed[adapter]), weights, shapes, dtype)
    driver = Driver(root, max_num_batched_tokens=256, adapter_gpu_bytes=3 * ADAPTER_BYTES)
    tier = driver.engine._adapters
    assert isinstance(tier, GpuAdapterTier)
    tier._host.land_in(LandingMemory(2 * ADAPTER_BYTES, dtype=torch.bfloat16, page_locked=True))
    asked = []
    for turn in range(3):
        for adapter, file in packed.items():
            for which in (file, adapter) if (turn + adapter) % 3 else (file,):
                prompt = random_prompt(10 + 9 * turn + adapter, LONG_VOCAB_SIZE, seed=turn)
                asked.append(
                    (adapter, prompt, driver.submit(prompt, which, max_tokens=12, temperature=0.0, logprobs=0))
                )
    driver.finish()
    assert tier._host._landed, "packed adapters lie in landing memory"
    assert driver.engine.stats().adapter_evictions > 0
    found: dict[int | None, list[tuple[list[int], int, list[float]]]] = {}
    for adapter, prompt, request_id in asked:
        tokens, logprobs = driver.generated(request_id)
        assert len(tokens) == 12
        found.setdefault(adapter, []).append((prompt + tokens, len(prompt), logprobs))
    check_near(found, references)
    with pytest.raises(AssertionError, match="ours"):
        check_near({5: found[6]}, references)


def test_an_adapter_that_overflows_fails_alone(root: Path, driver: Driver) -> None:
    save_peft_adapter(root / "8", long_llama(), seed=8, std=0.1)
    edit_tensors(root / "8", lambda tensors: {name: tensor * 1e18 for name, tensor in tensors.items()})
    bad = driver.submit(random_prompt(30, LONG_VOCAB_SIZE), 8, max_tokens=8)
    good = [driver.submit(random_prompt(30, LONG_VOCAB_SIZE), adapter, max_tokens=8) for adapter in (None, 0, 1)]
    driver.finish()
    assert driver.reason(bad) is FinishReason.ERROR
    assert "NaN or infinite" in (driver.outputs[bad][-1].error_message or "")
    assert [driver.reason(request_id) for request_id in good] == [FinishReason.LENGTH] * 3
