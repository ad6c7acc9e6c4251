"""JSON part by part is the JSON of the whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.json_parts import JsonParts

VALUES = st.one_of(st.none(), st.integers(-5, 5), st.text(max_size=5), st.lists(st.integers(0, 9), max_size=2))


@given(lists=st.lists(st.lists(st.lists(VALUES, max_size=3), max_size=4), max_size=4), text=st.text())
def test_the_parts_make_up_the_document(lists: list[list[list[Any]]], text: str) -> None:
    parts = JsonParts()
    document = {"text": text, "lists": [{"values": parts.place(slices), "more": 1} for slices in lists]}
    whole = {
        "text": text,
        "lists": [{"values": [value for items in slices for value in items], "more": 1} for slices in lists],
    }
    assert json.loads(b"".join(parts.of(document))) == whole


def test_slices_are_made_when_they_are_written() -> None:
    made = []

    def slices() -> Iterator[list[int]]:
        for value in range(3):
            made.append(value)
            yield [value]

    parts = JsonParts()
    written = parts.of({"values": parts.place(slices())})
    assert next(written) == b'{"values":'
    assert not made
    assert next(written) == b"[0"
    assert made == [0]


def test_a_place_that_is_not_in_the_document_is_an_error() -> None:
    parts = JsonParts()
    parts.place([[1]])
    with pytest.raises(AssertionError):
        next(parts.of({}))
