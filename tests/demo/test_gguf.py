"""A GGUF file becomes the same model and the tokenizer that it was made of."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
import torch
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from punica_core.errors import ConfigError
from punica_core.model.gguf import MODULES, OUTER, convert

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOKENS = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "ĠĠ"]
HEADS, KV_HEADS, HIDDEN = 4, 2, 32


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config).eval()
    for weight in model.parameters():
        weight.data = weight.data.bfloat16().float()  # so that the conversion's own rounding changes nothing
    return model


def neighbouring_pairs(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """How GGUF orders the rows of a rotary projection."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)


def write_gguf(model: LlamaForCausalLM, path: Path, architecture: str = "llama", permuted: bool = True) -> None:
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(100000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(["h e", "Ġ Ġ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    names = {theirs: ours for ours, theirs in OUTER.items()}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        if name not in names:
            _, _, layer, module = name.removesuffix(".weight").split(".", 3)
            short = next(key for key, value in MODULES.items() if value == module)
            names[name] = f"blk.{layer}.{short}.weight"
            if permuted and short in ("attn_q", "attn_k"):
                value = neighbouring_pairs(value, HEADS if short == "attn_q" else KV_HEADS)
        writer.add_tensor(names[name], value.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def converted(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("gguf")
    write_gguf(model, work / "model.gguf")
    (work / "folder").mkdir()
    convert(work / "model.gguf", work / "folder")
    return work / "folder"


def logits(model: LlamaForCausalLM) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.arange(3, 23)[None]).logits


def test_the_converted_model_computes_what_the_original_does(model: LlamaForCausalLM, converted: Path) -> None:
    loaded = LlamaForCausalLM.from_pretrained(converted, dtype=torch.float32).eval()
    assert torch.equal(logits(loaded), logits(model))


def test_rotary_rows_in_the_wrong_order_would_be_noticed(model: LlamaForCausalLM, tmp_path: Path) -> None:
    write_gguf(model, tmp_path / "model.gguf", permuted=False)
    (tmp_path / "folder").mkdir()
    convert(tmp_path / "model.gguf", tmp_path / "folder")
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "folder", dtype=torch.float32).eval()
    assert not torch.allclose(logits(loaded), logits(model), atol=1e-3)


def test_weights_are_stored_as_bfloat16_and_readable_by_all(converted: Path) -> None:
    assert json.loads((converted / "config.json").read_text())["dtype"] == "bfloat16"
    assert {path.stat().st_mode & 0o444 for path in converted.iterdir()} == {0o444}


def test_stop_ids_are_in_the_config_and_in_the_generation_config(converted: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        config = json.loads((converted / name).read_text())
        assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, 2)


def test_special_tokens_are_single_ids(converted: Path) -> None:
    tokenizer = Tokenizer.from_file(str(converted / "tokenizer.json"))
    assert tokenizer.encode("<|im_start|>h<|im_end|>").ids == [1, TOKENS.index("h"), 2]


def test_digits_are_split_from_the_spaces_before_them(converted: Path) -> None:
    tokenizer = Tokenizer.from_file(str(converted / "tokenizer.json"))
    # Plain byte-level splitting would give Ġ, Ġ, 1: the second space would join the number.
    assert tokenizer.encode("he  12").tokens == ["he", "ĠĠ", "1", "2"]


def test_any_text_survives_encoding_and_decoding(converted: Path) -> None:
    tokenizer = Tokenizer.from_file(str(converted / "tokenizer.json"))
    text = "Décris la mer 🌊\n  he 42<|im_end|>"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_transformers_reads_tokenizer_and_chat_template(converted: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted)
    messages = [{"role": "user", "content": "he"}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert rendered == "<|im_start|>user\nhe<|im_end|>\n<|im_start|>assistant\n"
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.model_max_length) == (2, 2, 128)


def test_another_architecture_is_refused(model: LlamaForCausalLM, tmp_path: Path) -> None:
    write_gguf(model, tmp_path / "model.gguf", architecture="gemma")
    with pytest.raises(ConfigError, match="not a Llama-shaped model"):
        convert(tmp_path / "model.gguf", tmp_path)
