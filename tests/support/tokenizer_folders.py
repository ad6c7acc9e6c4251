"""Tokenizer folders made in the test: a byte-level vocabulary, and one in the manner of SentencePiece."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BYTE_LEVEL_VOCAB = 259  # 256 bytes, <|im_start|>, <|im_end|>, <|endoftext|>
IM_START, IM_END, END_OF_TEXT = 256, 257, 258


def byte_level_tokenizer() -> Tokenizer:
    """Ids 0..255 are the bytes in order of the alphabet's characters, then three special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in ("<|im_start|>", "<|im_end|>", "<|endoftext|>")]
    )
    return tokenizer


def sentencepiece_tokenizer() -> Tokenizer:
    """Metaspace words with byte fallback and a BOS token, as Llama 2 has them."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁Hello", "▁world", "lo", "é"]
    words += [chr(code) for code in range(ord("a"), ord("z") + 1)]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={word: index for index, word in enumerate(words)}, merges=[], unk_token="<unk>", byte_fallback=True
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in ("<unk>", "<s>", "</s>")]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", words.index("<s>"))]
    )
    return tokenizer


def write_folder(folder: Path, tokenizer: Tokenizer, *, template: str | None = CHATML, **config: object) -> Path:
    """`folder` with tokenizer.json and tokenizer_config.json (`config`, and the template if there is one), and an empty
    config.json if it has none."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "config.json").exists():
        (folder / "config.json").write_text("{}", encoding="utf-8")
    tokenizer.save(str(folder / "tokenizer.json"))
    content = dict(config) | ({"chat_template": template} if template is not None else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(content), encoding="utf-8")
    return folder
