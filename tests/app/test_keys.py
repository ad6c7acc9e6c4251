"""Keys: what a file may say, whom a token belongs to, and what changes while the server runs."""

from __future__ import annotations

import hashlib
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app import key_file
from app import keys as keys_module
from app.cli import main
from app.keys import ApiKey, KeyLimits, KeyStore, hash_of, read_keys
from punica_core.errors import ConfigError, InvalidApiKey

ACME, OTHER = "acme-secret-1", "other-secret-2"
LIKE_OURS = "pk-" + "SECRET".ljust(43, "x")


def bearer(token: str) -> list[bytes]:
    return [f"Bearer {token}".encode()]


def write(folder: Path, text: str) -> Path:
    file = folder / "keys.yaml"
    file.write_text(text)
    return file


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(
        tmp_path,
        f"""
keys:
  - name: acme
    key: {ACME}
    adapters: [acme/*, shared]
    base: false
    requests_per_minute: 60
    tokens_per_minute: 1000
    max_concurrent: 4
  - {{name: other, key: "{hash_of(OTHER)}", admin: true}}
""",
    )


def test_a_file_says_what_each_key_may(file: Path) -> None:
    store = KeyStore(file=file)
    limits = KeyLimits(requests_per_minute=60, tokens_per_minute=1000, max_concurrent=4)
    assert store.find(bearer(ACME)) == ApiKey("acme", ("acme/*", "shared"), base=False, limits=limits)
    assert store.find(bearer(OTHER)) == ApiKey("other", metrics=True, admin=True)
    assert not store.is_open


_PART = st.text(alphabet="ab/*?[]!.\n", max_size=5)


@given(st.lists(_PART, max_size=4), st.lists(st.text(alphabet="ab/*?[].\n", max_size=5), max_size=4))
def test_all_patterns_together_are_shell_patterns(patterns: list[str], names: list[str]) -> None:
    key = ApiKey("k", tuple(patterns))
    for name in [*names, *patterns]:
        assert key.may_use(name) is any(fnmatchcase(name, pattern) for pattern in patterns)


def test_many_patterns_cost_little_more_than_one() -> None:
    """A key of a thousand names and wildcards lists a thousand adapters: each is looked at once."""
    many = ApiKey("k", (*(f"team-{i}/adapter" for i in range(1000)), *(f"group-{i}/*" for i in range(1000))))
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += 1

    names = [f"group-{i}/x" for i in range(1000)]
    sys.setprofile(count)
    try:
        assert all(map(many.may_use, names))
    finally:
        sys.setprofile(None)
    assert calls < 10 * len(names)


def test_patterns_decide_by_the_name_alone() -> None:
    key = ApiKey("k", ("acme/*", "v[12]", "exact"))
    assert [name for name in ("acme/a", "acme/a/b", "v2", "exact") if not key.may_use(name)] == []
    assert [name for name in ("acme", "Acme/a", "xacme/a", "v3", "exact2", "exact\n", "") if key.may_use(name)] == []
    assert ApiKey("k", ()).may_use("exact") is False
    assert (ApiKey("k").sees_all, key.sees_all) == (True, False)


@pytest.mark.parametrize(
    "authorization",
    [
        [],
        bearer("wrong-secret-1"),
        bearer(ACME.upper()),
        bearer(ACME[:-1]),
        bearer(ACME + "x"),
        bearer(hash_of(ACME)),
        bearer(hash_of(ACME).removeprefix("sha256:")),
        [ACME.encode()],
        [b"Basic " + ACME.encode()],
        [b"Bearer"],
        [b"Bearer "],
        [b"Bearer \xff\xfe"],
        [*bearer(ACME), *bearer("wrong-secret-1")],
        [b"Bearer " + b"x" * 5000],
    ],
)
def test_whatever_is_not_exactly_a_key_is_refused_without_repeating_it(file: Path, authorization: list[bytes]) -> None:
    with pytest.raises(InvalidApiKey) as caught:
        KeyStore(file=file).find(authorization)
    for value in authorization:
        assert value.split()[-1].decode(errors="replace") not in caught.value.message.replace("Bearer KEY", "")


@pytest.mark.parametrize("authorization", [b"bearer " + ACME.encode(), b"BEARER   " + ACME.encode() + b" "])
def test_the_scheme_may_be_spelled_as_http_allows(file: Path, authorization: bytes) -> None:
    assert KeyStore(file=file).find([authorization]).name == "acme"


def test_without_keys_anybody_may_use_all_but_administration() -> None:
    store = KeyStore()
    anybody = store.find([])
    assert (anybody.name, anybody.base, anybody.sees_all, anybody.metrics, anybody.admin) == (
        "",
        True,
        True,
        True,
        False,
    )
    assert store.find(bearer("whatever")) == anybody
    assert KeyStore(enable_admin=True).find([]).admin


def test_one_key_may_do_all_and_administrate_if_told_so() -> None:
    key = KeyStore(ACME).find(bearer(ACME))
    assert (key.name, key.sees_all, key.metrics, key.admin) == ("default", True, True, False)
    assert KeyStore(ACME, enable_admin=True).find(bearer(ACME)).admin


def test_one_key_and_a_file_go_together(file: Path) -> None:
    store = KeyStore("the-one-key", file)
    assert {store.find(bearer(token)).name for token in (ACME, OTHER, "the-one-key")} == {"acme", "other", "default"}


@pytest.mark.parametrize(
    ("single", "complaint"),
    [(ACME, "entry 1 ('acme') has the same key as"), ("the-one-key", "entry 2 ('default') has the name of")],
)
def test_an_entry_that_collides_with_the_one_key_says_so(tmp_path: Path, single: str, complaint: str) -> None:
    text = f"keys: [{{name: acme, key: {ACME}}}, {{name: default, key: {OTHER}}}]"
    with pytest.raises(ConfigError) as caught:
        KeyStore(single, write(tmp_path, text))
    assert f"{complaint} the key given by api_key." in caught.value.message
    assert single not in caught.value.message


def test_no_token_is_kept(file: Path) -> None:
    store = KeyStore("the-one-key", file)
    kept = repr([vars(store), vars(store._ring), store.keys])
    for token in (ACME, OTHER, "the-one-key"):
        assert token not in kept
        assert repr(hashlib.sha256(token.encode()).digest()) in kept  # what is looked at is what would hold it


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "Expected `object`, got `null`"),
        ("keys: []", "length >= 1"),
        ("keys: [{name: a}]", r"entry 1 \('a'\): Object missing required field `key`"),
        ("keys: [{key: SECRETSECRET}]", "entry 1: Object missing required field `name`"),
        ("keys: [{name: a, key: SECRETSECRET, admn: true}]", "unknown field 'admn' .did you mean 'admin'"),
        (
            "keys: [{name: a, key: SECRETSECRET, SECRETSECRE2: 1}]",
            "an unknown field; known ones are name, key, adapters",
        ),
        ("key: [SECRETSECRET]", "unknown field 'key' .did you mean 'keys'"),
        ("SECRETSECRET: a", "an unknown field; known ones are keys"),
        ("keys: [SECRETSECRET]", "entry 1: Expected `object`, got `str`"),
        ("keys: {SECRETSECRET: a}", "keys: Expected `array`, got `object`"),
        ("keys: [{name: a, key: SECRETSECRET}, {name: SECRET b, key: a}]", "entry 2, name: 1 to 64 letters"),
        ("keys: [{name: a, key: 1234567890}]", r"entry 1 \('a'\), key: Expected `str`, got `int`"),
        ("keys: [{name: a, key: SECRETSECRE2}, {name: b, key: SECRET}]", r"entry 2 \('b'\): a key has 8 to 512"),
        ("keys: [{name: a, key: SECRET SECRET}]", "no spaces"),
        ("keys: [{name: a, key: 'sha256:SECRETSECRET'}]", "64 hexadecimal digits"),
        ("keys: [{name: a, key: SECRETSECRET, requests_per_minute: 0}]", r"'a'\), requests_per_minute: .*>= 1"),
        ("keys: [{name: a, key: SECRETSECRET, adapters: [sql, 5]}]", r"'a'\), adapters\[1\]: Expected `str`"),
        ("keys: [{name: a, key: SECRETSECRET, max_concurrent: many}]", "Expected `int"),
        ("keys: [{name: a, key: SECRETSECRET, admin: 1}]", "Expected `bool`"),
        (
            "keys: [{name: a, key: SECRETSECRET}, {name: a, key: SECRETSECRE2}]",
            r"entry 2 \('a'\) has the name of entry 1",
        ),
        (
            "keys: [{name: a, key: SECRETSECRET}, {name: b, key: SECRETSECRET}]",
            r"entry 2 \('b'\) has the same key as entry 1 \('a'\)",
        ),
        ("keys: [{name: a, key: SECRETSECRET", r"not valid YAML \(line 2, column 1\)"),
        ("keys: [{name: a, key: *SECRETSECRET}]", "not valid YAML"),
        ("keys: [{name: a, key: 2001-99-99}]", r"cannot read \(line 1, column 23\)"),
        ("keys:\n- name: a\n  key: SECRETSECRET\n- name: b\n  key: 2001-99-99", r"cannot read \(line 5, column 8\)"),
        ("keys: [{name: a, key: !!bool SECRETSECRET}]", "cannot read"),
        ("keys: [{name: a, key: !!timestamp SECRETSECRET}]", "cannot read"),
        ("keys: [{name: a, key: !!int ''}]", "cannot read"),
        ("\x00", "not valid YAML"),
        ("keys: [{name: a, key: SECRETSECRET, key: b}]", r"gives a field twice \(line 1, column 37\)"),
        ("keys:\n- {name: a, key: SECRETSECRET}\nkeys:\n- {name: b, key: SECRETSECRE2}", r"twice \(line 3, column 1\)"),
        ("keys: !!set {SECRETSECRET}", "entry 1: Expected `object`, got `str`"),
        ("keys: !!pairs [name: SECRETSECRET]", "entry 1: Expected `object`, got `array`"),
        ("keys: [{name: a, 5: SECRETSECRET}]", r"entry 1 \('a'\): a field's name that is not text"),
        ("5: SECRETSECRET", "yaml: a field's name that is not text"),
        ("keys: [{name: a, '` - at `$.keys[7].SECRETSECRET': 1}]", r"entry 1 \('a'\): an unknown field"),
        ("'` - at `$.keys[7].SECRETSECRET': 1", "yaml: an unknown field"),
        (f"keys: [{{name: {LIKE_OURS}, key: acme}}]", "entry 1, name: .*, and no key"),
    ],
)
def test_a_wrong_file_is_refused_by_place_and_never_repeats_a_key(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        KeyStore(file=write(tmp_path, text))
    assert "keys.yaml" in caught.value.message
    assert "SECRET" not in caught.value.message
    assert "1234567890" not in caught.value.message


def test_entries_may_share_and_replace_what_one_says(tmp_path: Path) -> None:
    text = (
        f"keys: [&a {{name: a, key: {ACME}, admin: true}}, &b {{<<: *a, name: b, key: {OTHER}}}, "
        "{<<: *b, name: c, key: third-key}]"
    )
    keys = [key for _, key in read_keys(write(tmp_path, text))]
    assert [(key.name, key.admin) for key in keys] == [("a", True), ("b", True), ("c", True)]


def test_a_key_of_ours_is_no_name_but_most_that_resembles_one_is(tmp_path: Path) -> None:
    token = keys_module.new_token()
    with pytest.raises(ConfigError, match="no key"):
        read_keys(write(tmp_path, f"keys: [{{name: {token}, key: {ACME}}}]"))
    for name in ("pk-acme", token[:-1], f"{token}x", f"a{token}"):
        ((_, key),) = read_keys(write(tmp_path, f"keys: [{{name: {name}, key: {ACME}}}]"))
        assert key.name == name


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_keys(tmp_path / "nothing.yaml")
    with pytest.raises(ConfigError, match="Is a directory"):
        read_keys(tmp_path)
    with pytest.raises(ConfigError, match="more than 4194304 bytes"):
        read_keys(write(tmp_path, " " * (key_file.MAX_FILE_BYTES + 1)))


@pytest.mark.parametrize("single", ["short", "with space", "ünïcödë-key", "line\nbreak"])
def test_one_key_that_no_client_could_send_is_refused(single: str) -> None:
    with pytest.raises(ConfigError, match=r"api_key: a key has 8 to 512") as caught:
        KeyStore(single)
    assert single not in caught.value.message


def test_the_command_makes_a_key_and_the_entry_for_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "new", "acme"]) == 0
    made = capsys.readouterr()
    token = made.out.strip()
    assert token not in made.err
    store = KeyStore(file=write(tmp_path, f"keys:\n{made.err}"))
    assert store.find(bearer(token)).name == "acme"
    assert main(["keys", "new", "acme"]) == 0
    assert capsys.readouterr().out.strip() != token
    assert main(["keys", "new", "a b"]) == 1


def test_the_command_hashes_a_key_from_a_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import io

    monkeypatch.setattr("sys.stdin", io.StringIO(f"{ACME}\n"))
    assert main(["keys", "hash"]) == 0
    assert capsys.readouterr().out.strip() == f"sha256:{hashlib.sha256(ACME.encode()).hexdigest()}"
    monkeypatch.setattr("sys.stdin", io.StringIO("short\n"))
    assert main(["keys", "hash"]) == 1
    assert capsys.readouterr().err.startswith("error: this cannot be a key: a key has 8 to 512 ")
