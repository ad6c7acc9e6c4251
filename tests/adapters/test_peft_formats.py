"""What PEFT can save besides plain LoRA computes what PEFT computes, in one batch with everything else (fp32, 1e-4)."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from punica_core.errors import AdapterInvalid, AdapterMismatch, AdapterUnsupported
from punica_core.lora.cache import AdapterCache
from punica_core.lora.packed import opener_for
from punica_core.lora.plan import Segment
from punica_core.lora.segmented import SegmentedLoRA
from punica_core.lora.weights import AdapterWeights, load_adapter
from punica_core.model.probe import AttentionProbe
from tests.support.adapter_formats import (
    BASES,
    LAYERS,
    PHI3,
    PROMPT,
    VOCABULARY,
    Case,
    Q,
    errors_against_peft,
    load_for,
    peft_of,
)
from tests.support.adapter_loading import granted
from tests.support.driven_runner import DrivenRunner, random_prompt
from tests.support.peft_adapters import (
    adapter_ref,
    edit_config,
    edit_tensors,
    save_peft_adapter,
    tiny_llama,
)

TOLERANCE = 1e-4


@pytest.mark.parametrize("name", [name for name in BASES if name != "qwen2, untied"])
def test_all_formats_in_one_batch_are_pefts(name: str, tmp_path: Path) -> None:
    configs = {**PHI3} if name == "phi3" else {**LAYERS, **VOCABULARY}
    cases = [Case(f"{name}: {case}", config) for case, config in configs.items()]
    errors = errors_against_peft(BASES[name], cases, tmp_path)
    assert {case: error for case, error in errors.items() if error > TOLERANCE} == {}


def spelled(old: str, new: str) -> Callable[[Path], None]:
    return lambda folder: edit_tensors(
        folder, lambda found: {name.replace(old, new): tensor for name, tensor in found.items()}
    )


def without_prefix(prefix: str) -> Callable[[Path], None]:
    return lambda folder: edit_tensors(
        folder, lambda found: {name.removeprefix(prefix): tensor for name, tensor in found.items()}
    )


EVERYTHING = {"target_modules": ["q_proj", "embed_tokens", "lm_head"], "use_dora": True}
TRAINED = {"use_dora": True, "modules_to_save": ["lm_head"], "trainable_token_indices": [5, 9]}
SPELLINGS = [
    Case("no base_model.model", EVERYTHING, edit=without_prefix("base_model.model.")),
    Case("no model either", EVERYTHING, edit=without_prefix("base_model.model.model.")),
    Case("the adapter's name in lora_A and B", EVERYTHING, edit=spelled("_proj.lora_B.", "_proj.lora_B.mine.")),
    Case("the adapter's name behind magnitudes", EVERYTHING, edit=spelled("vector", "vector.mine.weight")),
    Case("the adapter's name behind lora_embedding_A", EVERYTHING, edit=spelled("embedding_A", "embedding_A.mine")),
    Case("compiled", EVERYTHING, edit=spelled("base_model.model.", "base_model.model._orig_mod.")),
    Case("FSDP", EVERYTHING, edit=spelled("layers.0.", "layers.0._fsdp_wrapped_module.")),
    Case(
        "modules_to_save by their raw name",
        {"target_modules": Q, "modules_to_save": ["lm_head"]},
        edit=spelled("lm_head.weight", "lm_head.modules_to_save.default.weight"),
    ),
    Case(
        "saved in place, without modules_to_save",
        {"target_modules": Q, "modules_to_save": ["lm_head", "embed_tokens"]},
        edit=lambda folder: edit_config(folder, modules_to_save=None),
    ),
    *(Case(f"in {dtype}", TRAINED, dtype) for dtype in (torch.float16, torch.bfloat16, torch.float64)),
]


def test_other_spellings_and_dtypes_are_pefts_too(tmp_path: Path) -> None:
    errors = errors_against_peft(BASES["llama"], SPELLINGS, tmp_path)
    assert {case: error for case, error in errors.items() if error > TOLERANCE} == {}


def test_a_copy_of_the_bases_weight_may_be_left_out_and_must_be_equal(tmp_path: Path) -> None:
    loaded = DrivenRunner(tiny_llama()).loaded
    copy = "base_model.model.lm_head.base_layer.weight"
    folder = save_peft_adapter(tmp_path / "adapter", target_modules=["lm_head"])
    whole = load_for(loaded, folder)
    edit_tensors(folder, lambda found: found | {copy: found[copy].half()})
    assert load_for(loaded, folder).key == whole.key
    edit_tensors(folder, lambda found: {name: tensor for name, tensor in found.items() if name != copy})
    assert load_for(loaded, folder).key == whole.key
    changed = tiny_llama().lm_head.weight.detach().clone()
    changed[300, 2] += 0.01
    edit_tensors(folder, lambda found: found | {copy: changed})
    with pytest.raises(AdapterMismatch, match=r"lm_head\.base_layer\.weight.*differs.*row 300"):
        load_for(loaded, folder)


def test_a_bias_that_the_base_does_not_have_is_refused(tmp_path: Path) -> None:
    folder = save_peft_adapter(tmp_path / "adapter", bias="all")
    name = "base_model.model.model.layers.0.self_attn.q_proj.base_layer.bias"
    edit_tensors(folder, lambda found: found | {name: torch.ones(64)})
    with pytest.raises(AdapterMismatch, match="has no bias in the base model"):
        load_for(DrivenRunner(tiny_llama()).loaded, folder)


@pytest.mark.parametrize(("kind", "lost"), [("all", "k_proj.bias"), ("lora_only", "q_proj.base_layer.bias")])
def test_biases_that_are_announced_and_not_there_are_missed(tmp_path: Path, kind: str, lost: str) -> None:
    base = BASES["qwen2, untied"]
    loaded = DrivenRunner(base()).loaded
    folder = save_peft_adapter(tmp_path / "adapter", base(), bias=kind, target_modules=Q)
    assert load_for(loaded, folder).modules
    name = f"model.layers.1.self_attn.{lost}"
    edit_tensors(folder, lambda found: {n: t for n, t in found.items() if not n.endswith(name)})
    path = name.removesuffix(".bias").removesuffix(".base_layer")
    with pytest.raises(AdapterInvalid, match=rf"bias is '{kind}'.*no bias of '{re.escape(path)}'.*set bias to 'none'"):
        load_for(loaded, folder)
    edit_tensors(folder, lambda found: {n: t for n, t in found.items() if "bias" not in n})
    with pytest.raises(AdapterInvalid, match="no bias of 'model"):
        load_for(loaded, folder)
    edit_config(folder, bias="none")
    assert load_for(loaded, folder).modules


def test_the_bias_of_a_norm_is_refused(tmp_path: Path) -> None:
    folder = save_peft_adapter(tmp_path / "adapter", bias="all")
    edit_tensors(folder, lambda found: found | {"base_model.model.model.norm.bias": torch.ones(64)})
    with pytest.raises(AdapterUnsupported, match=r"model\.norm\.bias"):
        load_for(DrivenRunner(tiny_llama()).loaded, folder)


def test_a_gain_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    base = tiny_llama()
    with torch.no_grad():
        base.model.layers[1].self_attn.q_proj.weight[7] = 0
    folder = save_peft_adapter(tmp_path / "adapter", target_modules=Q, use_dora=True)
    zero = {"base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"}
    edit_tensors(folder, lambda found: {n: t * 0 if n in zero else t for n, t in found.items()})
    with pytest.raises(AdapterInvalid, match=r"DoRA gain of 'model\.layers\.1\.self_attn\.q_proj' is inf in row 7"):
        load_for(DrivenRunner(base).loaded, folder)


def test_lora_and_a_saved_weight_of_one_module_are_refused(tmp_path: Path) -> None:
    folder = save_peft_adapter(tmp_path / "adapter", target_modules=["lm_head"])
    edit_tensors(folder, lambda found: found | {"base_model.model.lm_head.weight": torch.ones(512, 64)})
    with pytest.raises(AdapterInvalid, match="'lm_head' has LoRA and a fully trained weight"):
        load_for(DrivenRunner(tiny_llama()).loaded, folder)


@pytest.mark.parametrize("key", ["modules_to_save", "trainable_token_indices"])
def test_the_key_depends_on_what_is_done_with_the_tensors(tmp_path: Path, key: str) -> None:
    values = {"modules_to_save": ["lm_head"], "trainable_token_indices": [5, 9]}
    folder = save_peft_adapter(tmp_path / "adapter", target_modules=Q, **{key: values[key]})
    loaded = DrivenRunner(tiny_llama()).loaded
    before = load_for(loaded, folder).key
    if key == "trainable_token_indices":
        edit_config(folder, trainable_token_indices=[9, 5])
    else:
        edit_tensors(folder, lambda found: {n: t + 1 if "lm_head" in n else t for n, t in found.items()})
    assert load_for(loaded, folder).key != before


def test_everything_an_adapter_keeps_is_counted(tmp_path: Path) -> None:
    loaded = DrivenRunner(BASES["qwen2, tied"]()).loaded
    folder = save_peft_adapter(
        tmp_path / "adapter",
        BASES["qwen2, tied"](),
        target_modules=["q_proj", "embed_tokens"],
        modules_to_save=["lm_head"],
        use_dora=True,
        bias="all",
    )
    weights = load_for(loaded, folder)
    vocabulary = weights.vocabulary
    assert vocabulary is not None
    assert vocabulary.embedding is not None
    modules = [*weights.modules.values(), vocabulary.embedding]
    kept = [t for m in modules for t in (m.a, m.b, m.row_gain, m.bias) if t is not None]
    kept.append(vocabulary.head_matrix)
    size = sum(tensor.nbytes for tensor in kept)
    assert size <= weights.nbytes <= size + 64 * len(kept)
    assert len({tensor.untyped_storage().data_ptr() for tensor in kept}) == 1


def test_logits_of_prompts_use_the_head_of_their_own_adapter(tmp_path: Path) -> None:
    """Scored prompts have many rows of logits, others one or none: the head's segments differ from the layers'."""
    base = tiny_llama
    folders = [
        save_peft_adapter(tmp_path / "head", base(), target_modules=["lm_head"]),
        save_peft_adapter(tmp_path / "saved", base(), seed=2, target_modules=Q, modules_to_save=["lm_head"]),
        save_peft_adapter(
            tmp_path / "rows", base(), seed=3, target_modules=Q, trainable_token_indices={"lm_head": [7]}
        ),
    ]
    driven = DrivenRunner(base())
    driven.adapters.update({slot: load_for(driven.loaded, folder) for slot, folder in enumerate(folders)})
    scored = [driven.sequence(PROMPT, slot, prompt_logprobs=0) for slot in (-1, 0, 1, 2)]
    short = [driven.sequence(PROMPT[:5], slot) for slot in (-1, 0, 1, 2)]
    together = driven.step([*scored, *short], budget=6)
    for sequence in scored:
        alone = DrivenRunner(base(), driven.adapters)
        solo = alone.sequence(PROMPT, driven.slots[sequence.request_id], prompt_logprobs=0)
        expected = alone.step([solo], budget=6).prompt_logprobs[solo.request_id]
        got = together.prompt_logprobs[sequence.request_id]
        assert [entry.logprob for entry in got] == pytest.approx([entry.logprob for entry in expected], abs=1e-4)
    chosen = [driven.logits_of(sequence)[0] for sequence in short]
    assert all(not torch.allclose(a, b, atol=0.01) for i, a in enumerate(chosen) for b in chosen[:i])


def test_in_bfloat16_no_format_is_twice_as_far_off_as_peft(tmp_path: Path) -> None:
    """Against PEFT in fp32, on all rows of a prompt at once."""
    base = BASES["qwen2, untied"]
    driven = DrivenRunner(base().bfloat16())
    ids = random_prompt(48, base().config.vocab_size)
    ratios = {}
    for slot, (name, config) in enumerate({**LAYERS, **VOCABULARY}.items()):
        folder = save_peft_adapter(tmp_path / name, base(), seed=slot, std=0.08, **config)
        weights = load_for(driven.loaded, folder)
        exact, half = peft_of(folder, base)(ids), peft_of(folder, lambda: base().bfloat16())(ids).float()
        ours = all_logits(driven, weights, ids)
        ratios[name] = float((ours - exact).square().mean().sqrt() / (half - exact).square().mean().sqrt())
    assert {name: ratio for name, ratio in ratios.items() if ratio > 2} == {}


def all_logits(driven: DrivenRunner, weights: AdapterWeights, token_ids: list[int]) -> torch.Tensor:
    """[T, V] fp32 logits of a prompt under one adapter, by the model as it serves."""
    loaded, segments = driven.loaded, (Segment(0, len(token_ids), weights),)
    lora = SegmentedLoRA(loaded.groups, 0, loaded.device, loaded.head)
    loaded.lora.step, loaded.head_lora.step = lora.step(segments), lora.head_step(segments)
    loaded.embedding_lora.step = lora.embedding_step(segments)
    probe = {"input_ids": torch.tensor([token_ids]), "position_ids": torch.arange(len(token_ids))[None]}
    with torch.inference_mode():
        logits: torch.Tensor = loaded.model(**probe, use_cache=False, paged=AttentionProbe()).logits[0].float()
    loaded.lora.step = loaded.head_lora.step = loaded.embedding_lora.step = None
    return logits


def test_the_cache_hands_out_what_needs_the_base(tmp_path: Path) -> None:
    loaded = DrivenRunner(tiny_llama()).loaded
    folder = save_peft_adapter(tmp_path / "adapter", target_modules=["q_proj", "lm_head"], use_dora=True)
    cache = AdapterCache(loaded.module_shapes, loaded.dtype, 10_000_000, open_adapter=opener_for(loaded.base_weights))
    weights = cache.weights(granted(cache, adapter_ref(folder)).slot)
    assert weights.key == load_for(loaded, folder).key
    assert cache.stats().bytes_used == weights.nbytes
    cache.close()


def test_without_the_base_plain_lora_loads_all_the_same(tmp_path: Path) -> None:
    loaded = DrivenRunner(tiny_llama()).loaded
    folder = save_peft_adapter(tmp_path / "adapter", r=3)
    alone = load_adapter(adapter_ref(folder), loaded.module_shapes, torch.float32, 256)
    assert alone.key == load_for(loaded, folder).key
