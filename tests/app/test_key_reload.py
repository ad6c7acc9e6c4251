"""A file of keys is read again when it changes, once it rests; what is wrong, or does not answer, changes nothing."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from pathlib import Path

import pytest

from app import keys as keys_module
from app.keys import KeyStore
from punica_core.errors import InvalidApiKey
from tests.app.test_keys import ACME, OTHER, bearer, file

__all__ = ["file"]  # the fixture


class Watched:
    """A store that watches its file, looking every few milliseconds, and what it told of changes."""

    def __init__(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(keys_module, "WATCH_SECONDS", 0.01)
        self.told: list[list[str]] = []
        self.store = KeyStore(file=file, on_change=lambda keys: self.told.append([key.name for key in keys]))

    async def __aenter__(self) -> Watched:
        self._task = asyncio.create_task(self.store.watch())
        return self

    async def __aexit__(self, *error: object) -> None:
        assert not self._task.done()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def until(self, *names: str) -> None:
        async with asyncio.timeout(10):
            while sorted(key.name for key in self.store.keys) != sorted(names):
                await asyncio.sleep(0.005)


async def test_a_changed_file_is_read_again_and_revoked_keys_are_refused(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with Watched(file, monkeypatch) as watched:
        file.write_text(f"keys: [{{name: new, key: {OTHER}}}]")
        await watched.until("new")
        assert watched.store.find(bearer(OTHER)).name == "new"
        with pytest.raises(InvalidApiKey):
            watched.store.find(bearer(ACME))
        assert watched.told == [["new"]]
    assert "1 in all; new: new; gone: acme, other" in caplog.text
    assert OTHER not in caplog.text


@pytest.mark.parametrize(
    "wrong", ["keys: [{name: a, key: SECRETSECRET", "keys: !!bool SECRETSECRET", "keys: !!set {SECRETSECRET}"]
)
async def test_a_wrong_new_file_changes_nothing_and_is_told_once(
    file: Path, wrong: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with Watched(file, monkeypatch) as watched:
        file.write_text(wrong)
        while "The keys stay as they are" not in caplog.text:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.1)  # several more looks at the same file
        assert watched.store.find(bearer(ACME)).name == "acme"
        assert watched.told == []
        assert caplog.text.count("The keys stay as they are") == 1
        assert "SECRET" not in caplog.text
        file.unlink()
        while caplog.text.count("The keys stay as they are") < 2:
            await asyncio.sleep(0.005)
        assert watched.store.find(bearer(ACME)).name == "acme"
        file.write_text(f"keys: [{{name: new, key: {OTHER}}}]")
        await watched.until("new")


async def test_a_file_that_is_being_written_is_left_alone_until_it_rests(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = iter(range(1, 1000))
    real = keys_module._state
    resting = False
    # a write between any two looks, and what stands there is a valid beginning of the whole
    monkeypatch.setattr(keys_module, "_state", lambda path: real(path) if resting else next(states))
    async with Watched(file, monkeypatch) as watched:
        file.write_text(f"keys:\n- {{name: first, key: {OTHER}}}\n")
        await asyncio.sleep(0.1)
        assert watched.told == []
        file.write_text(f"keys:\n- {{name: first, key: {OTHER}}}\n- {{name: second, key: {ACME}}}\n")
        resting = True
        await watched.until("first", "second")
        assert watched.told == [["first", "second"]]


async def test_a_reload_that_was_asked_for_does_not_wait_for_the_next_look(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Watched(file, monkeypatch) as watched:
        monkeypatch.setattr(keys_module, "WATCH_SECONDS", 3600.0)
        await asyncio.sleep(0.05)  # the look that was due; the next is an hour away
        before = os.stat(file)
        file.write_text(f"keys: [{{name: new, key: {OTHER}}}]")
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        watched.store.ask_reload()
        await watched.until("new")


@pytest.mark.parametrize("call", ["_state", "read_keys"])
async def test_a_file_that_does_not_answer_holds_up_nobody(
    file: Path, call: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(keys_module, "READ_SECONDS", 0.3)
    answers, real, held = threading.Event(), getattr(keys_module, call), list[int]()
    answers.set()

    def hang(path: Path) -> object:
        if not answers.is_set():
            held.append(threading.get_ident())
            answers.wait(30)
        return real(path)

    monkeypatch.setattr(keys_module, call, hang)
    async with Watched(file, monkeypatch) as watched:
        await asyncio.sleep(0.05)
        answers.clear()
        file.write_text(f"keys: [{{name: new, key: {OTHER}}}]")
        watched.store.ask_reload()
        longest, until = 0.0, time.monotonic() + 1.0
        while time.monotonic() < until:
            began = time.monotonic()
            await asyncio.sleep(0.01)
            longest = max(longest, time.monotonic() - began)
        assert longest < 0.3
        assert len(held) == 1
        assert threading.get_ident() not in held
        assert watched.store.find(bearer(ACME)).name == "acme"
        assert caplog.text.count("does not answer") == 1
        answers.set()
        await watched.until("new")
