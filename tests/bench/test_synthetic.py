"""Adapters made in memory are adapters: distinct, repeatable, and the same as those that are written to disk."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from punica_core.bench.shapes import SHAPES, linear_shapes, model_folder, write_tokenizer
from punica_core.bench.synthetic import SyntheticAdapters, main
from punica_core.errors import ConfigError
from punica_core.lora.cache import AdapterCache
from punica_core.lora.gpu_tier import GpuAdapterTier
from punica_core.lora.layers import LinearGroup
from punica_core.lora.table_modules import TableModules
from punica_core.lora.tables import num_module_elements
from punica_core.lora.weights import AdapterWeights, load_adapter
from punica_core.ops.layout import Field
from punica_core.scheduler.plan import SkipReason
from tests.support.peft_adapters import adapter_ref

SHAPES_OF_TWO = {"model.layers.0.q_proj": (64, 48), "model.layers.1.down_proj": (176, 64), "lm_head": (64, 512)}


def read(adapters: SyntheticAdapters, index: int, dtype: torch.dtype = torch.float32) -> AdapterWeights:
    with adapters.open(adapters.refs[index], SHAPES_OF_TWO, dtype, 256) as source:
        weights = source.read()
        assert weights.nbytes == source.nbytes
    return weights


def test_each_has_its_rank_and_weights_of_its_own() -> None:
    adapters = SyntheticAdapters(4, (3, 16))
    found = [read(adapters, index) for index in range(4)]
    assert len({weights.key for weights in found}) == 4
    for weights, lora_rank in zip(found, (3, 16, 3, 16), strict=True):
        assert sorted(weights.modules) == ["model.layers.0.q_proj", "model.layers.1.down_proj"]
        for path, module in weights.modules.items():
            fan_in, fan_out = SHAPES_OF_TWO[path]
            assert (module.a.shape, module.b.shape) == ((lora_rank, fan_in), (fan_out, lora_rank))
            assert module.a.std() > 0.01
            assert module.b.std() > 0.01
    for one, other in itertools.combinations((found[0], found[2]), 2):
        for path, module in one.modules.items():
            assert not torch.equal(module.a, other.modules[path].a)
            assert not torch.equal(module.b, other.modules[path].b)
    q, down = found[1].modules.values()
    assert not torch.equal(q.a.flatten()[:64], down.a.flatten()[:64])


def test_equal_arguments_give_equal_adapters_and_another_seed_others() -> None:
    once, again, other = (SyntheticAdapters(2, (8,), seed=seed) for seed in (1, 1, 2))
    assert once.refs == again.refs
    assert not set(once.refs) & set(other.refs)
    first = [read(adapters, 1) for adapters in (once, again, other)]
    a = [weights.modules["model.layers.0.q_proj"].a for weights in first]
    assert torch.equal(a[0], a[1])
    assert not torch.equal(a[0], a[2])
    assert first[0].key == first[1].key != first[2].key


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_room_that_is_asked_for_is_enough(dtype: torch.dtype) -> None:
    adapters = SyntheticAdapters(3, (1, 16, 37))
    found = [read(adapters, index, dtype) for index in range(3)]
    on_device = sum(num_module_elements(module) for weights in found for module in weights.modules.values())
    room = adapters.arena_bytes(SHAPES_OF_TWO, dtype.itemsize)
    assert on_device * dtype.itemsize <= room
    assert sum(weights.nbytes for weights in found) <= room


def test_all_of_them_fit_the_device_at_once() -> None:
    adapters = SyntheticAdapters(3, (5, 16, 8))
    room = adapters.arena_bytes(SHAPES_OF_TWO, 4)
    groups = [
        LinearGroup(index, (path,), fan_in, (fan_out,))
        for index, (path, (fan_in, fan_out)) in enumerate(SHAPES_OF_TWO.items())
    ]
    host = AdapterCache(SHAPES_OF_TWO, torch.float32, room, open_adapter=adapters.open)
    tier = GpuAdapterTier(host, TableModules(groups), room, dtype=torch.float32, device="cpu")
    slots = []
    for ref in adapters.refs:
        while isinstance(grant := tier.acquire(ref), SkipReason):
            assert grant is SkipReason.ADAPTER_LOADING
            assert tier.poll(0.0) == []
            tier.wait_for_load(1.0)
        slots.append(grant.slot)
        tier.release(ref)
    stats = tier.stats()
    assert (stats.resident, stats.gpu_resident, stats.evictions) == (3, 3, 0)
    for index, slot in enumerate(slots):
        made = read(adapters, index).modules["model.layers.1.down_proj"]
        record = tier.tables.records[1, slot]
        start = int(record[Field.A_OFFSET])
        assert torch.equal(tier.arena.buffer[start : start + made.a.numel()].view(made.a.shape), made.a)
    tier.close()


def test_written_folders_hold_the_same_adapters(tmp_path: Path) -> None:
    assert main([str(tmp_path), "--model", "tiny", "--adapters", "2", "--lora-ranks", "4,8"]) == 0
    shapes = linear_shapes(tmp_path / "tiny")
    assert len(shapes) == 7 * SHAPES["tiny"]["num_hidden_layers"]
    adapters = SyntheticAdapters(2, (4, 8))
    for ref in adapters.refs:
        written = load_adapter(adapter_ref(tmp_path / "adapters" / ref.name), shapes, torch.bfloat16, 256)
        made = adapters.open(ref, shapes, torch.bfloat16, 256).read()
        assert set(written.modules) == set(made.modules)
        for path, module in written.modules.items():
            assert torch.equal(module.a, made.modules[path].a)
            assert torch.equal(module.b, made.modules[path].b)
            assert module.scale == made.modules[path].scale


def test_the_tokenizer_knows_every_id(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    write_tokenizer(tmp_path, 512)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 512
    assert tokenizer.decode(tokenizer.encode("naïve 漢").ids) == "naïve 漢"
    assert all(tokenizer.decode([token]) for token in range(256, 510))


def test_a_model_is_a_known_name_or_a_folder(tmp_path: Path) -> None:
    assert model_folder(str(tmp_path), tmp_path) == tmp_path
    with pytest.raises(ConfigError, match=r"'llama-9'.*llama-3.1-8b"):
        model_folder("llama-9", tmp_path)


@pytest.mark.parametrize(("name", "parameters"), [("llama-3.1-8b", 8.03e9), ("llama-2-7b", 6.74e9)])
def test_the_shapes_have_the_published_number_of_parameters(name: str, parameters: float, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_folder(name, tmp_path)))
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(parameters, rel=0.001)
