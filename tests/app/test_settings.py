from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from app import settings
from app.settings import Settings, load, parse_bytes
from punica_core.config import EngineConfig
from punica_core.errors import ConfigError

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def test_default_file_holds_every_key_with_the_default_of_the_code() -> None:
    written = yaml.safe_load((CONFIGS / "default.yaml").read_text())
    assert list(written.keys() ^ settings.all_keys().keys()) == []
    assert load({}, {}, CONFIGS / "default.yaml") == Settings()


def test_every_key_of_the_default_file_has_a_comment_above_it() -> None:
    lines = (CONFIGS / "default.yaml").read_text().splitlines()
    blocks = "\n".join(lines).split("\n\n")
    assert all(line.startswith("#") or ":" in line for block in blocks for line in block.splitlines())
    uncommented = [block for block in blocks if not block.startswith("#")]
    assert uncommented == []


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_every_shipped_file_is_valid(path: Path) -> None:
    assert isinstance(load({}, {}, path), Settings)


@pytest.mark.parametrize("name", ["demo.yaml", "single-gpu.yaml"])
def test_a_file_for_a_case_holds_only_what_it_changes(name: str) -> None:
    written = yaml.safe_load((CONFIGS / name).read_text())
    chosen = load({}, {}, CONFIGS / name)
    defaults = Settings()
    assert {key for key in settings.all_keys() if getattr(chosen, key) != getattr(defaults, key)} == set(written)


def test_every_key_of_the_gpu_file_has_a_comment_above_it() -> None:
    lines = (CONFIGS / "single-gpu.yaml").read_text().splitlines()
    above = {line.partition(":")[0]: before for before, line in pairwise(lines) if line[:1].isalpha()}
    assert above.keys() == yaml.safe_load("\n".join(lines)).keys()
    assert all(before.startswith("# ") for before in above.values())


def test_the_gpu_file_asks_for_a_gpu_and_for_large_steps() -> None:
    chosen = load({}, {}, CONFIGS / "single-gpu.yaml")
    assert (chosen.device, chosen.max_num_seqs, chosen.max_num_batched_tokens) == ("cuda", 256, 2048)


def test_keys_shared_with_the_engine_have_its_defaults() -> None:
    engine = EngineConfig(model="")
    shared = [name for name in EngineConfig.__struct_fields__ if name in settings.all_keys()]
    assert len(shared) == len(EngineConfig.__struct_fields__)
    assert {name: getattr(Settings(), name) for name in shared} == {name: getattr(engine, name) for name in shared}


def test_command_line_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = tmp_path / "punica.yaml"
    file.write_text("port: 1\nmax_queue: 1\nseed: 1\n")
    loaded = load({"port": "3"}, {"PUNICA_PORT": "2", "PUNICA_MAX_QUEUE": "2"}, file)
    assert (loaded.port, loaded.max_queue, loaded.seed, loaded.max_num_seqs) == (3, 2, 1, 64)


def test_environment_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "punica.yaml"
    file.write_text("seed: 7\n")
    assert load({}, {"PUNICA_CONFIG": str(file)}).seed == 7


@pytest.mark.parametrize("name", ["max_num_seq", "max-num-seqs", "Max_Num_Seqs"])
def test_unknown_key_in_a_file_names_the_nearest(tmp_path: Path, name: str) -> None:
    file = tmp_path / "punica.yaml"
    file.write_text(f"{name}: 4\n")
    with pytest.raises(ConfigError, match=r"Did you mean max_num_seqs\?"):
        load({}, {}, file)


def test_unknown_variable_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"PUNICA_MODLE\. Did you mean PUNICA_MODEL\?"):
        load({}, {"PUNICA_MODLE": "x"})


def test_variables_of_other_programs_are_ignored() -> None:
    assert load({}, {"PORT": "9", "HOME": "/", "PUNICAL": "x"}) == Settings()


def test_kubernetes_port_is_explained() -> None:
    with pytest.raises(ConfigError, match=r"Kubernetes.*enableServiceLinks"):
        load({}, {"PUNICA_PORT": "tcp://10.0.0.1:8000"})


def test_kubernetes_port_does_not_matter_when_the_command_line_gives_one() -> None:
    assert load({"port": 5}, {"PUNICA_PORT": "tcp://10.0.0.1:8000"}).port == 5


@pytest.mark.parametrize(
    "variable",
    [
        "PUNICA_SERVICE_HOST",
        "PUNICA_SERVICE_PORT",
        "PUNICA_SERVICE_PORT_HTTP",
        "PUNICA_PORT_8000_TCP",
        "PUNICA_PORT_8000_TCP_ADDR",
        "PUNICA_WEB_PORT",
    ],
)
def test_other_kubernetes_variables_are_ignored(variable: str) -> None:
    assert load({}, {variable: "tcp://10.0.0.1:8000"}) == Settings()


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), (5, 5), ("2GiB", 2**31), ("2g", 2**31), ("2GB", 2 * 10**9), ("1.5 KiB", 1536), ("10b", 10)],
)
def test_sizes_have_units(text: str | int, size: int) -> None:
    assert parse_bytes(text, "x") == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "2 XB", "nan", True, None, "1e3"])
def test_what_is_no_size_is_refused(text: object) -> None:
    with pytest.raises(ConfigError, match="size in bytes"):
        parse_bytes(text, "x")


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("port", "eighty", "whole number"),
        ("port", 80.5, "whole number"),
        ("port", True, "whole number"),
        ("port", 70000, "between 0 and 65535"),
        ("device", "tpu", "auto, cpu, cuda"),
        ("prefix_cache", "maybe", "true or false"),
        ("drain_timeout", "nan", "finite"),
        ("drain_timeout", 0, "positive"),
        ("model", 7, "text is expected"),
        ("max_num_seqs", 0, "at least 1"),
        ("max_num_batched_tokens", 8, "below max_num_seqs"),
    ],
)
def test_wrong_values_say_what_is_wanted(key: str, value: object, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load({key: value}, {})


@pytest.mark.parametrize("content", ["- a\n- b\n", "just text", "a: [", "\x00"])
def test_file_that_is_no_mapping_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "punica.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError):
        load({}, {}, file)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.yaml: No such file"):
        load({}, {}, tmp_path / "nothing.yaml")


def test_base_name_is_the_folders_name_unless_given(tmp_path: Path) -> None:
    assert Settings(model="org/SmolLM2").base_name == "SmolLM2"
    assert Settings(model="org/SmolLM2", served_model_name="gpt-oss:120b").base_name == "gpt-oss:120b"


def test_a_file_that_is_no_yaml_is_told_by_line_and_column(tmp_path: Path) -> None:
    file = tmp_path / "punica.yaml"
    file.write_text("seed: 1\nport: [1\n")
    with pytest.raises(ConfigError, match=r"punica\.yaml is not valid YAML: line 3, column 1: expected ',' or ']'"):
        load({}, {}, file)


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ("*SECRET", "alias"),
        ("!SECRET", "tag"),
        ("!SECRET-'x'", "tag"),
        ("!S!ECRET", "tag handle"),
        ("!!SECRET x", "tag"),
    ],
)
def test_an_unquoted_key_that_yaml_takes_for_something_else_is_not_repeated(
    value: str, what: str, tmp_path: Path
) -> None:
    file = tmp_path / "punica.yaml"
    file.write_text(f"port: 1\napi_key: {value}\n")
    complaint = rf"line 2, column 10: [\w ]+ {what}; a text that begins with '\*', '&' or '!' needs quotes\.$"
    with pytest.raises(ConfigError, match=complaint) as caught:
        load({}, {}, file)
    assert "ECRET" not in caught.value.message


@pytest.mark.parametrize("value", ["!!bool SECRET", "!!timestamp SECRET", "!!int ''", "2001-99-99"])
def test_a_value_that_its_tag_does_not_fit_is_refused_and_not_repeated(tmp_path: Path, value: str) -> None:
    file = tmp_path / "punica.yaml"
    file.write_text(f"api_key: {value}\n")
    with pytest.raises(ConfigError, match=r"punica\.yaml has a value that YAML cannot read\.$"):
        load({}, {}, file)


def test_a_file_that_is_no_text_is_not_valid(tmp_path: Path) -> None:
    file = tmp_path / "punica.yaml"
    file.write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ConfigError, match="is not valid YAML: 'utf-8' codec can't decode"):
        load({}, {}, file)


def test_a_tilde_in_a_path_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    file = tmp_path / "punica.yaml"
    file.write_text("model: ~/models/small\nserved_model_name: ~name\n")
    chosen = load({"adapters": "~/adapters"}, {"PUNICA_CACHE": "~/cache"}, file)
    assert chosen.model == "/home/someone/models/small"
    assert (chosen.adapters, chosen.cache) == ("/home/someone/adapters", "/home/someone/cache")
    assert chosen.served_model_name == "~name"


def test_a_key_is_in_no_text_about_the_settings() -> None:
    loaded = load({}, {"PUNICA_API_KEY": "a-secret-of-ours"})
    assert loaded.api_key == "a-secret-of-ours"
    assert "a-secret-of-ours" not in repr(loaded)


def test_a_key_that_is_no_text_is_not_repeated(tmp_path: Path) -> None:
    file = tmp_path / "punica.yaml"
    file.write_text("api_key: 12345678\n")
    with pytest.raises(ConfigError, match="api_key is no text; text is expected") as caught:
        load({}, {}, file)
    assert "12345678" not in caught.value.message


def test_admin_by_flag_and_keys_from_a_file_do_not_go_together() -> None:
    with pytest.raises(ConfigError, match="admin: true"):
        Settings(enable_admin=True, api_keys_file="keys.yaml")
    assert Settings(enable_admin=True, api_keys_file="keys.yaml", api_key="long-enough").enable_admin


def test_roots_are_the_adapters_folder_unless_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert Settings().roots == []
    assert Settings(adapters="/a").roots == ["/a"]
    assert Settings(adapters="/a", adapter_roots="~/b:/c:").roots == ["/home/someone/b", "/c"]


@pytest.mark.parametrize("fraction", ["0", "1.01", "-0.5"])
def test_a_share_of_the_gpu_is_above_nothing_and_at_most_all_of_it(fraction: str) -> None:
    with pytest.raises(ConfigError, match="above 0 and at most 1"):
        load({"gpu_memory_fraction": fraction}, {})
    assert load({"gpu_memory_fraction": "1"}, {}).gpu_memory_fraction == 1.0
