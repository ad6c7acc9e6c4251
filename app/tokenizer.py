"""Text to token ids and back, from a model folder's tokenizer files; needs no torch and no transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders

from app.chat_template import ChatTemplate
from app.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from punica_core.errors import ConfigError, InvalidRequest

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
LONG_TEXT = 8192
"""Characters from which tokenizing is worth a thread: about a millisecond, which the event loop begins to feel."""
_USUAL_CHARACTERS = 8
"""Of a token, at most, in a text that fits: beyond it is worth a look."""
_CONTEXT_TOKENS = 8
"""Prompt tokens that precede a completion when its first characters are decoded."""
_BYTE_TOKEN = re.compile(r"^<0x([0-9A-Fa-f]{2})>$")


class Tokenizer:
    """A model's tokenizer and chat template.

    vocab_size: rows of the model's output head; ids below it are valid, also those that no token has.
    """

    def __init__(self, rust: RustTokenizer, vocab_size: int, special_tokens: Mapping[str, str], template: str | None):
        rust.no_truncation()
        rust.no_padding()
        self._rust = rust
        self.vocab_size = vocab_size
        self._bos = special_tokens.get("bos_token")
        self._special_tokens = dict(special_tokens)
        self._template = ChatTemplate(template, special_tokens) if template is not None else None
        self._special_ids = {token for token, added in rust.get_added_tokens_decoder().items() if added.special}
        self._byte_level = isinstance(rust.decoder, decoders.ByteLevel)
        self._pieces = self._piece_table()
        self._plain_pieces = [b"" if token in self._special_ids else piece for token, piece in enumerate(self._pieces)]
        self._longest_piece = max(map(len, self._pieces), default=0)

    @classmethod
    def load(cls, folder: Path, vocab_size: int, template: str | None = None) -> Tokenizer:
        """Read tokenizer.json, tokenizer_config.json and the chat template. `template` replaces the folder's own.

        Raises ConfigError if tokenizer.json is missing or damaged.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"{folder} has no tokenizer.json.")
        try:
            rust = RustTokenizer.from_file(str(path))
        except BaseException as error:  # tokenizers raises bare Exception for a problem of a file, or panics
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise ConfigError(f"{path} cannot be read: {error}.") from None
        config = _read_json(folder / "tokenizer_config.json")
        special = _special_tokens(_read_json(folder / "special_tokens_map.json") | config)
        return cls(rust, vocab_size, special, template if template is not None else find_template(folder, config))

    @property
    def has_chat_template(self) -> bool:
        """Whether chat requests can be served."""
        return self._template is not None

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """bos_token, eos_token, ... as chat templates may use them."""
        return self._special_tokens

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation; it holds its special tokens already. Raises InvalidRequest."""
        if self._template is None:
            raise InvalidRequest(
                "This model has no chat template, so it cannot take messages: use /v1/completions, put a "
                "chat_template.jinja into the model's folder, or start the server with --chat-template FILE.",
                param="messages",
            )
        return self._template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables,
        )

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids. A text that begins with the BOS token (a rendered template) gets no second one."""
        if self._bos and text.startswith(self._bos):
            add_special_tokens = False
        if len(text) <= LONG_TEXT:
            return self._rust.encode(text, add_special_tokens=add_special_tokens).ids
        # costs more to begin with, but releases the GIL
        return self._rust.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids

    def fewest_tokens(self, text: str) -> int:
        """A lower bound of what `encode` gives for a text, without tokenizing it: hopelessly long ones take half a
        minute. 0 where nothing can be said."""
        if not self._byte_level or not self._longest_piece:
            return 0
        # byte-level tokens cover every byte; normal forms compose up to four characters into one
        characters = len(text) if self._rust.normalizer is None else len(text) // 4
        return characters // self._longest_piece

    def surely_exceeds(self, text: str, limit: int) -> bool:
        """Whether a text has more than `limit` tokens, told from no more of it than has twice as many; False where that
        is not sure. Tokenizing all of a text takes as long as the text is, which its fate need not.

        Tokens of parts are a few more than those of the whole, which has fewer cuts: hence twice as many.
        """
        if len(text) <= max(_USUAL_CHARACTERS * limit, LONG_TEXT):
            return False
        count = at = 0
        while at < len(text) and count <= 2 * limit:
            space = text.rfind(" ", at + 1, at + LONG_TEXT)
            end = space if space > 0 else at + LONG_TEXT
            count += len(self._rust.encode_batch([text[at:end]], add_special_tokens=False)[0].ids)
            at = end
        return count > 2 * limit

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of all ids at once."""
        if len(ids) <= LONG_TEXT:
            return self._rust.decode(list(ids), skip_special_tokens=skip_special_tokens)
        # as in `encode`
        return self._rust.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]

    def detokenizer(self, *, skip_special_tokens: bool = True, prompt_ids: Sequence[int] = ()) -> Detokenizer:
        """A decoder for one sequence. `prompt_ids`: when the output continues the prompt's text (completions)."""
        if self._byte_level:
            return ByteDetokenizer(self._plain_pieces if skip_special_tokens else self._pieces)
        context = prompt_ids[-_CONTEXT_TOKENS:]
        return WindowDetokenizer(
            lambda ids: self._rust.decode(list(ids), skip_special_tokens=skip_special_tokens), context
        )

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token by itself, special ones included; empty for an id that no token has."""
        return self._pieces[token_id]

    def token_string(self, token_id: int) -> str:
        """The token as the vocabulary writes it ("Ġthe", "▁the"); empty for an id that no token has."""
        return self._rust.id_to_token(token_id) or ""

    def is_special(self, token_id: int) -> bool:
        """Whether the token is one that skip_special_tokens skips."""
        return token_id in self._special_ids

    def _piece_table(self) -> list[bytes]:
        vocabulary = self._rust.get_vocab(with_added_tokens=True)
        pieces = [b""] * max(self.vocab_size, max(vocabulary.values(), default=-1) + 1)
        to_bytes = _byte_level_piece if self._byte_level else _sentencepiece_piece
        alphabet = _byte_alphabet()
        for token, token_id in vocabulary.items():
            pieces[token_id] = to_bytes(token, alphabet)
        return pieces


def _byte_alphabet() -> dict[str, int]:
    """Character → byte of byte-level BPE (GPT-2): printable bytes stand for themselves, the rest are moved up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    moved = [byte for byte in range(0x100) if byte not in set(printable)]
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(moved)}


def _byte_level_piece(token: str, alphabet: Mapping[str, int]) -> bytes:
    try:
        return bytes([alphabet[char] for char in token])
    except KeyError:  # an added token that was written as plain text
        return token.encode()


def _sentencepiece_piece(token: str, alphabet: Mapping[str, int]) -> bytes:
    if match := _BYTE_TOKEN.match(token):
        return bytes([int(match[1], 16)])
    return token.replace("▁", " ").encode()


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from None
    return document if isinstance(document, dict) else {}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in _SPECIAL_TOKENS:
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def find_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The folder's chat template: its own file first, then the older places."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    return template_in(_read_json(folder / "chat_template.json")) or template_in(config)


def template_in(config: Mapping[str, Any]) -> str | None:
    """The chat template in a tokenizer's configuration; of several, the one named "default"."""
    source = config.get("chat_template")
    if isinstance(source, list):
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    return source if isinstance(source, str) else None
