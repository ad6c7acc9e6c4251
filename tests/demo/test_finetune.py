"""The example adapters' training and judging: data kept apart, a loss that is what it says, judges that can say no."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from examples.finetune.chat import IGNORED, Encoded, collate, shared_prefix
from examples.finetune.data import Example, json_extract, pirate, sentiment, sql
from examples.finetune.recipes import RECIPES
from examples.finetune.train import answer_loss, batches, rate, save

# peft asks transformers under a name that transformers is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

ENCODED = [Encoded((7, 8, 9, 10, 11, 12, 2), 5), Encoded((7, 8, 9, 20, 21, 22, 23, 24, 2), 6)]


def tiny() -> PeftModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.3,
    )
    shape = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    return get_peft_model(LlamaForCausalLM(config), shape)


@pytest.mark.parametrize("name", RECIPES)
def test_no_held_out_prompt_is_trained_on(name: str) -> None:
    task = RECIPES[name].task
    training = {example.prompt for example in task.training()}
    held_out = {example.prompt for example in task.held_out()}
    assert len(held_out) >= 20
    assert not training & held_out


@pytest.mark.parametrize("name", RECIPES)
def test_data_is_the_same_at_every_call(name: str) -> None:
    task = RECIPES[name].task
    assert (task.training(), task.held_out()) == (task.training(), task.held_out())


@pytest.mark.parametrize("name", ["json-extract", "sentiment", "sql"])
def test_the_reference_answer_is_judged_perfect(name: str) -> None:
    task = RECIPES[name].task
    for example in task.held_out():
        assert task.judge(example, example.answer) == dict.fromkeys(task.METRICS, 1.0)


def test_names_goods_and_places_of_held_out_orders_are_new() -> None:
    for field in ("names", "items", "cities", "sentences", "chatter"):
        assert not set(getattr(json_extract.TRAINING, field)) & set(getattr(json_extract.HELD_OUT, field))


@pytest.mark.parametrize(
    ("answer", "figures"),
    [
        ("The order is for Ann.", {"valid": 0.0, "fields": 0.0, "exact": 0.0}),
        ('{"name": "Ann"}', {"valid": 0.0, "fields": 0.0, "exact": 0.0}),
        (
            '{"name": "Ann", "item": "mugs", "quantity": "2", "city": null}',
            {"valid": 1.0, "fields": 0.75, "exact": 0.0},
        ),
    ],
)
def test_a_wrong_object_is_judged_wrong(answer: str, figures: dict[str, float]) -> None:
    wanted = json.dumps({"name": "Ann", "item": "mugs", "quantity": 2, "city": None})
    assert json_extract.judge(Example("", wanted), answer) == figures


@pytest.mark.parametrize(
    ("answer", "one_word", "accuracy"), [("positive", 1, 0), ("It is negative.", 0, 0), ("negative", 1, 1)]
)
def test_sentiment_wants_one_word_and_the_right_one(answer: str, one_word: float, accuracy: float) -> None:
    judged = sentiment.judge(Example("", "negative"), answer)
    assert judged == {"one_word": one_word, "accuracy": accuracy}


@pytest.mark.parametrize(
    ("answer", "runs", "execution"),
    [
        ("SELECT  count(*) FROM boats", 1, 1),
        ("SELECT COUNT(*) + 1 FROM boats;", 1, 0),
        ("SELECT COUNT(*) FROM ships;", 0, 0),
        ("DROP TABLE boats;", 0, 0),
        ("You can count the boats.", 0, 0),
    ],
)
def test_sql_is_judged_by_what_it_returns(answer: str, runs: float, execution: float) -> None:
    judged = sql.judge(Example("", "SELECT COUNT(*) FROM boats;", facts="boats"), answer)
    assert (judged["runs"], judged["execution"], judged["exact"]) == (runs, execution, 0)


def test_plain_english_is_no_pirate() -> None:
    assert pirate.judge(Example("", ""), "Let me explain: it can be cold in the north.")["pirate"] == 0
    assert pirate.judge(Example("", ""), "Arr, it be cold in the north, matey!")["pirate"] == 1


def test_the_loss_with_a_shared_prefix_equals_the_plain_loss_of_the_answers() -> None:
    model = tiny()
    prefix = shared_prefix(ENCODED)
    assert prefix == [7, 8, 9]
    loss = answer_loss(model, torch.tensor([prefix]), collate(ENCODED, len(prefix), pad_id=0))
    plain = collate(ENCODED, 0, pad_id=0)
    assert torch.allclose(loss, model(input_ids=plain.ids, attention_mask=plain.mask, labels=plain.labels).loss)


def test_gradients_through_the_shared_prefix_equal_the_plain_ones() -> None:
    model = tiny()
    weights = [p for p in model.parameters() if p.requires_grad]
    answer_loss(model, torch.tensor([[7, 8, 9]]), collate(ENCODED, 3, pad_id=0)).backward()
    shared = [p.grad.clone() for p in weights]
    model.zero_grad()
    plain = collate(ENCODED, 0, pad_id=0)
    model(input_ids=plain.ids, attention_mask=plain.mask, labels=plain.labels).loss.backward()
    assert all(torch.allclose(a, p.grad, atol=1e-5) for a, p in zip(shared, weights, strict=True))
    assert all(p.grad.abs().max() > 0 for p in weights)


def test_only_answer_tokens_are_labels() -> None:
    batch = collate(ENCODED, 3, pad_id=0)
    assert batch.labels.tolist() == [
        [IGNORED, IGNORED, 12, 2, IGNORED, IGNORED],
        [IGNORED, IGNORED, IGNORED, 23, 24, 2],
    ]


def test_every_example_is_seen_before_any_is_seen_again() -> None:
    examples = [Encoded((n,), 1) for n in range(6)]
    drawn = batches(examples, 2, random.Random(0))
    first = [e for _ in range(3) for e in next(drawn)]
    assert sorted(e.ids[0] for e in first) == [0, 1, 2, 3, 4, 5]


def test_the_rate_warms_up_and_falls_to_nothing() -> None:
    factors = [rate(step, 50) for step in range(50)]
    assert factors[0] < factors[3] < max(factors) == 1.0
    assert factors[-1] < 0.01


def test_an_adapter_is_saved_with_the_public_name_of_its_base_and_in_its_dtype(tmp_path: Path) -> None:
    save(tiny(), RECIPES["sentiment"], tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert {t.dtype for t in load_file(tmp_path / "adapter_model.safetensors").values()} == {torch.float16}
