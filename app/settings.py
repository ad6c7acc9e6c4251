"""What the user chose: one frozen `Settings`, from the command line, the environment, a YAML file, or the defaults.

Precedence: command line > `PUNICA_*` > file > default. A key that does not exist is an error that names the nearest
one, wherever it came from. This is the only module that reads the environment; it does so through an argument.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from punica_core.config import Device, DType, EngineConfig, LoadFormat, LogLevel, SgmvBackend
from punica_core.errors import ConfigError

ENV_PREFIX = "PUNICA_"
START_TIMEOUT = 600.0
"""Default of start_timeout, and the bound on what comes before its value is known."""
YAML_VALUE_ERRORS = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""What YAML's constructors raise, besides its own errors, for values that are not of the type they are tagged with."""

_YAML_SIGIL = re.compile(r"\b(alias|anchor|tag handle|tag) (['\"]).*\2.*", re.DOTALL)
"""The end of YAML's errors that repeat what stands behind a `*`, `&` or `!`, which may be the rest of a secret."""

_BYTE_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_BYTE_UNITS |= {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_SERVICE_URL = re.compile(r"^(tcp|udp|sctp)://")
_SERVICE_VARIABLE = re.compile(
    r"^PUNICA_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)$"
)


# ruff: noqa: RUF009  # _key is dataclasses.field() with our metadata
def _key(
    default: Any, help_text: str, *, is_bytes: bool = False, is_path: bool = False, is_secret: bool = False
) -> Any:
    metadata = {"help": help_text, "bytes": is_bytes, "path": is_path, "secret": is_secret}
    return dataclasses.field(default=default, metadata=metadata, repr=not is_secret)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Every key of the server. The help texts are those of `punica serve --help` and of configs/default.yaml."""

    model: str = _key("", "base model: a folder, or a hub id; empty takes the demo model", is_path=True)
    adapters: str = _key(
        "", "folder whose sub-folders are PEFT adapters; empty serves none (the demo brings its own)", is_path=True
    )
    served_model_name: str = _key("", "name of the base model in the API; empty takes the last part of `model`")
    chat_template: str = _key("", "Jinja file of a chat template to use in place of the model's own", is_path=True)
    adapter_chat_templates: bool = _key(
        False, "use the chat template in an adapter's folder; only for folders whose authors you trust"
    )
    host: str = _key("127.0.0.1", "address to listen on")
    port: int = _key(8000, "port to listen on; 0 takes a free one")
    device: Device = _key("auto", "where the model runs")
    dtype: DType = _key("auto", "dtype of weights; auto: float32 on the CPU, the checkpoint's own on a GPU")
    load_format: LoadFormat = _key("auto", "auto reads the model's weights; dummy makes random ones, for benchmarks")
    gpu_memory_fraction: float = _key(0.9, "share of the GPU's memory that the worker may use")
    kv_tokens: int = _key(0, "tokens of KV memory; 0 sizes it from free memory")
    max_model_len: int = _key(0, "longest sequence (prompt + output) in tokens; 0 takes the model's own limit")
    max_num_seqs: int = _key(64, "most sequences in one step")
    max_num_batched_tokens: int = _key(512, "token budget of one step; longer prompts are prefilled in chunks")
    target_step_ms: float = _key(
        30.0,
        "milliseconds that a step should take at most while others stream: on a GPU prompts are cut to fit them; on a "
        "CPU any value above 0 has long prompts cut in pieces of a fixed size; 0 turns either off",
    )
    lora: bool = _key(True, "serve adapters; without, the base model alone gets all memory")
    max_lora_rank: int = _key(256, "adapters of a higher rank are refused; on a GPU it sizes a step's scratch memory")
    adapter_host_bytes: int = _key(0, "host memory for adapters, e.g. 2GiB; 0 sizes it from free memory", is_bytes=True)
    adapter_gpu_bytes: int = _key(0, "GPU memory for adapters, e.g. 2GiB; 0 sizes it from free memory", is_bytes=True)
    adapter_load_timeout: float = _key(60.0, "seconds after which an adapter's load fails its requests")
    prefix_cache: bool = _key(True, "reuse the KV of equal prompt beginnings (same adapter and tenant)")
    sgmv: SgmvBackend = _key("auto", "how LoRA is computed: CUDA kernels, or plain torch (reference)")
    compile: bool = _key(True, "on a GPU, compile the model's layers at start; false starts sooner and runs slower")
    cuda_graphs: bool = _key(True, "on a GPU, capture decode steps at start; false starts sooner and runs slower")
    seed: int = _key(-1, "seeds the noise of requests that bring no seed; -1 takes a new one at each start")
    max_queue: int = _key(1024, "sequences that may wait beyond max_num_seqs; more are answered 429")
    max_queue_tokens: int = _key(
        2**20, "prompt tokens that may wait for a first output; more are answered 429, but for a prompt that is alone"
    )
    max_body_bytes: int = _key(
        8 * 2**20, "largest request body, e.g. 8MiB; a larger one is answered 413", is_bytes=True
    )
    max_total_body_bytes: int = _key(
        2**28, "memory for all request bodies together, e.g. 256MiB; beyond it requests are answered 429", is_bytes=True
    )
    request_timeout: float = _key(60.0, "seconds that a client gets to send a request; then it is answered 408")
    send_timeout: float = _key(
        60.0, "seconds in which a client must take something of what is sent; then its connection is closed"
    )
    stream_keep_alive: float = _key(15.0, "seconds of silence after which a stream sends a comment")
    drain_timeout: float = _key(30.0, "seconds that running requests get to finish after SIGTERM")
    start_timeout: float = _key(
        START_TIMEOUT,
        "seconds that the start may make no progress before it is ended with an error that names its step",
    )
    stall_timeout: float = _key(
        60.0, "a step longer than this, and than 10x the slowest one so far, restarts the worker"
    )
    api_key: str = _key(
        "", "the one key that clients need; better given as PUNICA_API_KEY; empty asks for none", is_secret=True
    )
    api_keys_file: str = _key("", "YAML file of keys, each with its adapters and limits (docs/api.md)", is_path=True)
    open_metrics: bool = _key(False, "answer /metrics without a key also when keys are configured")
    enable_admin: bool = _key(
        False, "load and unload adapters over HTTP: by anybody if there are no keys, else by the one of api_key"
    )
    adapter_roots: str = _key(
        "", "folders below which adapters may be loaded over HTTP, separated by ':'; empty takes `adapters`"
    )
    cache: str = _key("", "folder for converted models and tokenizers; empty takes ~/.cache/punica", is_path=True)
    log_level: LogLevel = _key("info", "least severe log lines to print")

    def __post_init__(self) -> None:
        positive = (
            "max_queue",
            "max_queue_tokens",
            "max_body_bytes",
            "max_total_body_bytes",
            "drain_timeout",
            "start_timeout",
            "stall_timeout",
            "request_timeout",
            "send_timeout",
            "stream_keep_alive",
        )
        for key in positive:
            if getattr(self, key) <= 0:
                raise ConfigError(f"{key} is {getattr(self, key)}; it must be positive.", param=key)
        if self.max_total_body_bytes < self.max_body_bytes:
            raise ConfigError(
                f"max_total_body_bytes is {self.max_total_body_bytes}; one body may have max_body_bytes, "
                f"{self.max_body_bytes}: raise the one or lower the other.",
                param="max_total_body_bytes",
            )
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; it must be between 0 and 65535.", param="port")
        if self.enable_admin and self.api_keys_file and not self.api_key:
            raise ConfigError(
                "enable_admin is for servers without keys or with the one of api_key; in a file of keys, mark those "
                "that may load and unload adapters with `admin: true`.",
                param="enable_admin",
            )
        self.engine_config().validate()

    @property
    def base_name(self) -> str:
        """Name of the base model in the API."""
        return self.served_model_name or Path(self.model).name or self.model

    @property
    def roots(self) -> list[str]:
        """Folders below which adapters may be loaded by path."""
        given = [os.path.expanduser(part) for part in self.adapter_roots.split(os.pathsep) if part]
        return given or ([self.adapters] if self.adapters else [])

    def engine_config(self) -> EngineConfig:
        """The worker's part, with relative paths made absolute."""
        shared = {name: getattr(self, name) for name in EngineConfig.__struct_fields__}
        shared["model"] = str(Path(self.model).resolve()) if self.model and Path(self.model).is_dir() else self.model
        shared["adapters"] = str(Path(self.adapters).resolve()) if self.adapters else ""
        return EngineConfig(**shared)


def all_keys() -> dict[str, dataclasses.Field[Any]]:
    """All keys in order of declaration."""
    return {field.name: field for field in dataclasses.fields(Settings)}


def key_type(name: str) -> Any:
    """The annotation of a key: str, int, float, bool or a Literal."""
    return typing.get_type_hints(Settings)[name]


def load(
    command_line: Mapping[str, Any], environ: Mapping[str, str], config_file: str | Path | None = None
) -> Settings:
    """Merge the sources. `command_line` holds only what was given; `config_file` None looks at PUNICA_CONFIG.

    Raises ConfigError for an unknown key, a value of the wrong type, or an unreadable file.
    """
    chosen = config_file or environ.get(ENV_PREFIX + "CONFIG")
    values: dict[str, Any] = {}
    if chosen:
        values |= {name: _convert(name, raw, f"{chosen}: {name}") for name, raw in _read_file(Path(chosen)).items()}
    values |= _from_environment(environ, overridden=command_line.keys())
    values |= {name: _convert(name, raw, flag(name)) for name, raw in command_line.items()}
    return Settings(**values)


def _read_file(path: Path) -> dict[str, Any]:
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"Cannot read the configuration file {path}: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {_yaml_problem(error)}.") from None
    except YAML_VALUE_ERRORS:
        raise ConfigError(f"{path} has a value that YAML cannot read.") from None  # it may be a secret
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"{path} holds a {type(document).__name__}; a mapping of keys to values is expected.")
    for name in document:
        if name not in all_keys():
            raise ConfigError(f"{path}: unknown key {name!r}.{did_you_mean(str(name))}", param=str(name))
    return document


def _yaml_problem(error: yaml.YAMLError | UnicodeDecodeError) -> str:
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return " ".join(str(error).split())
    problem = _YAML_SIGIL.sub(
        r"\1; a text that begins with '*', '&' or '!' needs quotes", str(getattr(error, "problem", error))
    )
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"


def _from_environment(environ: Mapping[str, str], overridden: typing.Collection[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for variable, raw in environ.items():
        if not variable.startswith(ENV_PREFIX) or variable == ENV_PREFIX + "CONFIG":
            continue
        name = variable.removeprefix(ENV_PREFIX).lower()
        if name in all_keys():
            if name not in overridden:
                values[name] = _convert_variable(name, variable, raw)
        elif not _SERVICE_VARIABLE.match(variable):
            raise ConfigError(f"Unknown environment variable {variable}.{did_you_mean(name, _variable)}", param=name)
    return values


def _convert_variable(name: str, variable: str, raw: str) -> Any:
    if _SERVICE_URL.match(raw) and name in ("port", "host"):
        raise ConfigError(
            f"{variable}={raw} was put into the environment by Kubernetes, because a Service named "
            f'"punica" exists in this namespace; it is not a {name}. Set `enableServiceLinks: false` in the pod, '
            f"rename the Service, or pass --{name}.",
            param=name,
        )
    return _convert(name, raw, variable)


def did_you_mean(name: str, spell: Callable[[str], str] = str) -> str:
    """A sentence to append that names the nearest key, or "" if none is near. spell: a key as its source has it."""
    close = difflib.get_close_matches(name.lower().replace("-", "_"), all_keys(), n=1, cutoff=0.5)
    return f" Did you mean {spell(close[0])}?" if close else ""


def _variable(name: str) -> str:
    return ENV_PREFIX + name.upper()


def flag(name: str) -> str:
    """A key as the command line writes it."""
    return "--" + name.replace("_", "-")


def _convert(name: str, raw: Any, source: str) -> Any:
    """`raw` (a string, or a YAML scalar) as the key's type."""
    if all_keys()[name].metadata["bytes"]:
        return parse_bytes(raw, source)
    kind = key_type(name)
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        if raw not in choices:
            raise ConfigError(f"{source} is {raw!r}; choose one of {', '.join(choices)}.", param=name)
        return raw
    if kind is bool:
        return _to_bool(raw, source)
    if kind is str:
        if not isinstance(raw, str):
            shown = "no text" if all_keys()[name].metadata["secret"] else repr(raw)
            raise ConfigError(f"{source} is {shown}; text is expected (put it in quotes).", param=name)
        return os.path.expanduser(raw) if all_keys()[name].metadata["path"] else raw  # no shell saw a file's ~
    return _to_number(kind, raw, source)


def _to_number(kind: type[int] | type[float], raw: Any, source: str) -> int | float:
    wanted = "a whole number" if kind is int else "a number"
    fits = isinstance(raw, str | int | float) and not isinstance(raw, bool)
    if not fits or (kind is int and isinstance(raw, float)):
        raise ConfigError(f"{source} is {raw!r}; {wanted} is expected.")
    try:
        number = kind(raw)
    except ValueError:
        raise ConfigError(f"{source} is {raw!r}; {wanted} is expected.") from None
    if number != number or number in (float("inf"), float("-inf")):
        raise ConfigError(f"{source} is {raw!r}; a finite number is expected.")
    return number


def _to_bool(raw: Any, source: str) -> bool:
    words = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
    if isinstance(raw, bool):
        return raw
    found = words.get(str(raw).lower())
    if found is None:
        raise ConfigError(f"{source} is {raw!r}; true or false is expected.")
    return found


def parse_bytes(raw: Any, source: str) -> int:
    """A size such as 1073741824, "2GiB" (2^30), "2G" (the same) or "2GB" (10^9), in bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(raw))
    unit = _BYTE_UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None or isinstance(raw, bool):
        raise ConfigError(f"{source} is {raw!r}; a size in bytes is expected, such as 1073741824, 512MiB or 2GiB.")
    return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit
