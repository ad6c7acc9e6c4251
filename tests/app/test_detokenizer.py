from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.detokenizer import StopStrings
from app.tokenizer import Tokenizer
from tests.support.tokenizer_folders import (
    BYTE_LEVEL_VOCAB,
    IM_END,
    byte_level_tokenizer,
    sentencepiece_tokenizer,
    write_folder,
)

BYTE_LEVEL = Tokenizer(byte_level_tokenizer(), 300, {}, None)
SENTENCEPIECE = Tokenizer(sentencepiece_tokenizer(), 400, {"bos_token": "<s>"}, None)


def pieces_of(tokenizer: Tokenizer, ids: list[int], size: int = 1, **options: bool) -> list[str]:
    detokenizer = tokenizer.detokenizer(**options)
    pieces = [detokenizer.push(ids[at : at + size]) for at in range(0, len(ids), size)]
    return [*pieces, detokenizer.flush()]


@given(st.lists(st.integers(0, 299), max_size=40), st.integers(1, 5), st.booleans())
def test_byte_level_pieces_join_to_the_decoding_of_all_ids(ids: list[int], size: int, skip: bool) -> None:
    joined = "".join(pieces_of(BYTE_LEVEL, ids, size, skip_special_tokens=skip))
    assert joined == BYTE_LEVEL.decode(ids, skip_special_tokens=skip)


@given(st.text(max_size=40), st.integers(1, 5))
def test_sentencepiece_pieces_join_to_the_decoding_of_all_ids(text: str, size: int) -> None:
    ids = SENTENCEPIECE.encode(text, add_special_tokens=True)
    assert "".join(pieces_of(SENTENCEPIECE, ids, size)) == SENTENCEPIECE.decode(ids)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte-level", "sentencepiece"])
@given(text=st.text(alphabet="aé日😀 ", min_size=1, max_size=20))
@settings(deadline=None)
def test_characters_are_never_split(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert not any("\ufffd" in piece for piece in pieces_of(tokenizer, ids))


def test_many_bytes_at_once_that_end_inside_a_character_are_held() -> None:
    text = "0000" + "\x80" * 4 + "\U00010000" * 3 + "\x80" + "\U00010000" * 2
    ids = SENTENCEPIECE.encode(text, add_special_tokens=True)
    assert "".join(pieces_of(SENTENCEPIECE, ids, 5)) == SENTENCEPIECE.decode(ids)


def test_a_character_that_is_cut_off_shows_at_the_end_only() -> None:
    ids = BYTE_LEVEL.encode("ab😀", add_special_tokens=False)[:-1]
    assert pieces_of(BYTE_LEVEL, ids) == ["a", "b", "", "", "", "\ufffd"]


def test_special_tokens_are_skipped_unless_asked_for() -> None:
    ids = [*BYTE_LEVEL.encode("a", add_special_tokens=False), IM_END]
    assert "".join(pieces_of(BYTE_LEVEL, ids)) == "a"
    assert "".join(pieces_of(BYTE_LEVEL, ids, skip_special_tokens=False)) == "a<|im_end|>"


def test_ids_without_a_token_are_no_text() -> None:
    assert pieces_of(BYTE_LEVEL, [BYTE_LEVEL_VOCAB + 5]) == ["", ""]


def test_a_completion_keeps_the_space_that_a_whole_text_would_lose() -> None:
    prompt = SENTENCEPIECE.encode("Hello", add_special_tokens=True)
    world = SENTENCEPIECE.encode("world", add_special_tokens=False)
    continuing = SENTENCEPIECE.detokenizer(prompt_ids=prompt)
    alone = SENTENCEPIECE.detokenizer()
    assert continuing.push(world) + continuing.flush() == " world"
    assert alone.push(world) + alone.flush() == "world"


def test_undecodable_bytes_are_not_held_for_ever() -> None:
    detokenizer = SENTENCEPIECE.detokenizer()
    continuation_byte = 3 + 0x80
    given_out = [detokenizer.push([continuation_byte]) for _ in range(100)]
    assert any(given_out)


@given(
    st.text(alphabet="ab", max_size=30),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=4),
    st.integers(1, 7),
    st.booleans(),
)
def test_stop_strings_are_found_wherever_pieces_break(text: str, stops: list[str], size: int, include: bool) -> None:
    matcher, given_out, found = StopStrings(stops, include), "", False
    for at in range(0, len(text), size):
        piece, found = matcher.push(text[at : at + size])
        given_out += piece
        if found:
            break
    if not found:
        given_out += matcher.flush()
    if not any(stop in text for stop in stops):
        assert (given_out, found) == (text, False)
    else:
        assert found
        if not include:
            assert not any(stop in given_out for stop in stops)
        assert text.startswith(given_out)


@given(
    st.lists(st.text(alphabet="ab", max_size=5), max_size=12),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=6), min_size=1, max_size=3),
)
def test_no_more_is_held_back_than_may_become_a_stop_string(pieces: list[str], stops: list[str]) -> None:
    matcher, text, given_out = StopStrings(stops), "", ""
    for piece in pieces:
        text += piece
        part, found = matcher.push(piece)
        given_out += part
        assert found is any(stop in text for stop in stops)
        if found:
            break
        beginnings = {stop[:length] for stop in stops for length in range(len(stop))}
        assert len(text) - len(given_out) == max(len(start) for start in beginnings if text.endswith(start))


class CountedText(str):
    """Counts how many of its characters are looked at, one by one."""

    looks = 0

    def __getitem__(self, key: Any) -> str:
        CountedText.looks += 1
        return super().__getitem__(key)


@pytest.mark.parametrize(
    "stops",
    [
        ["a" * 1023 + "b", "b" * 1024, "c" * 1024, "d" * 1024],
        ["ab" * 511 + "x", "ab" * 500 + "y", "ba" * 500 + "z", "aab" * 300],
        ["a" * 1023 + "b", ("a" * 31 + "b") * 32],
        ["END"],
    ],
    ids=lambda stops: stops[0][:4],
)
def test_no_stop_strings_make_a_character_cost_much(stops: list[str]) -> None:
    for piece in ("aaaa", "abab"):
        matcher = StopStrings([CountedText(stop) for stop in stops])
        CountedText.looks = 0
        assert not any(matcher.push(piece)[1] for _ in range(500))
        assert CountedText.looks <= 4 * len(stops) * 2000
    matcher.push("E")
    assert CountedText.looks > 0


def test_the_earliest_stop_string_counts_and_may_be_included() -> None:
    assert StopStrings(["cd", "b"]).push("abcd") == ("a", True)
    assert StopStrings(["cd", "b"], include=True).push("abcd") == ("ab", True)


def test_what_may_become_a_stop_string_is_held_back() -> None:
    matcher = StopStrings(["END"])
    assert matcher.push("the EN") == ("the ", False)
    assert matcher.push("X") == ("ENX", False)
    assert matcher.push("E") == ("", False)
    assert matcher.flush() == "E"


def test_a_model_folder_is_read_with_its_special_tokens(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, sentencepiece_tokenizer(), bos_token={"content": "<s>"})
    tokenizer = Tokenizer.load(folder, 400)
    assert tokenizer.encode("<s> lo", add_special_tokens=True).count(1) == 1
