"""What crosses the process boundary: typed, versioned messages between the front end and a worker.

A frame on the socket is a 4-byte little-endian length and a msgpack body. Commands go to the worker, events come
back. Fields are only ever added, with defaults; `PROTOCOL_VERSION` changes when that is not enough. No pickle, no
lookup of classes by name, no free-form dicts.

Life of a request: `Submit` → any number of `SequenceOutput`s without `finish_reason` → exactly one with it. That
holds also when its adapter is refused, it is cancelled, or it does not fit. If the worker dies, the socket's EOF
stands for the missing terminal outputs.
"""

from __future__ import annotations

import enum
import gc

import msgspec

from punica_core.config import EngineConfig, EngineLayout

PROTOCOL_VERSION = 2
MAX_FRAME_BYTES = 256 * 1024 * 1024
_LARGE_BODY = 1 << 18


class FinishReason(enum.StrEnum):
    """Why a sequence ended: a stop id or stop string, a token limit, the client's cancel, or an error."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are chosen. Values were checked by the front end.

    max_tokens: tokens to generate at most (>= 0; 0 only with prompt_logprobs).
    temperature: 0 is greedy. top_k: 0 is off. top_p, min_p: in [0, 1].
    presence_penalty, frequency_penalty: over generated tokens (OpenAI). repetition_penalty: over prompt and
    generated tokens (Keskar et al. 2019, arXiv 1909.05858), 1 is off.
    logit_bias: token id → added to the logit.
    seed: noise is a function of (seed, position) alone. None: the worker derives one.
    min_tokens: no stop id before that many tokens.
    logprobs: number of top alternatives to report (0: chosen token only); None: no logprobs.
    prompt_logprobs: the same for the prompt's tokens; such a request never reads the prefix cache.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def has_penalties(self) -> bool:
        """Whether a score depends on which tokens came before."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)


class FileSignature(msgspec.Struct, frozen=True, array_like=True):
    """Tells one state of a file from another: (inode, size in bytes, mtime and ctime in ns)."""

    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int


class AdapterRef(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter as the front end knows it: a name, a folder, and the state of the folder's files.

    The worker answers with the content's `adapter_key` or refuses it. Two refs with the same path and another
    signature are different versions: requests keep the version they came with.
    packed: the path is that of a packed file, whose state is both signatures.
    """

    name: str
    path: str
    config_signature: FileSignature
    weights_signature: FileSignature
    packed: bool = False


class NewSequence(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sequence to generate. `request_id` is unique among the client's unfinished sequences.

    tenant: salt of the prefix cache and key of fairness; sequences of different tenants never share KV blocks.
    """

    request_id: int
    prompt_ids: list[int]
    sampling: SamplingParams
    adapter: AdapterRef | None = None
    tenant: str = ""


class Configure(msgspec.Struct, frozen=True, tag=True):
    """The first command of a connection."""

    config: EngineConfig
    version: int = PROTOCOL_VERSION


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Sequences that arrived in one turn of the front end's loop: the worker plans them together."""

    sequences: list[NewSequence]


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """End these sequences; unknown or finished ids are ignored. Each live one still gets its terminal output."""

    request_ids: list[int]


class Forget(msgspec.Struct, frozen=True, tag=True):
    """No new sequence will use the adapters in these folders: what is kept of them is given back when its last
    sequence has ended. One that comes nevertheless is served, at the price of another load."""

    paths: list[str]


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Exit at once (the front end has drained)."""


Command = Configure | Submit | Cancel | Forget | Shutdown


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities (natural log) at one position, of the raw logits before bias, penalties and temperature.

    logprob: of the token itself; top: (token id, logprob) pairs, best first.
    """

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = []


class SequenceOutput(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """What a step produced for one sequence.

    token_ids: new tokens, in order; a stop id that ended the sequence is the last of them.
    logprobs: one entry per new token if asked for. prompt_logprobs: once, with the first output; None at position 0.
    stop_token_id: the stop id that ended the sequence, if one did.
    error_code, error_message: with finish_reason ERROR (see errors.from_wire).
    cached_tokens: prompt tokens read from the prefix cache (reported with the first token).
    adapter_key: content digest of the adapter used (reported with the first token), "" for the base model.
    """

    request_id: int
    token_ids: list[int] = []
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    stop_token_id: int | None = None
    error_code: str = ""
    error_message: str = ""
    cached_tokens: int = 0
    adapter_key: str = ""


class AdapterLoad(msgspec.Struct, frozen=True, array_like=True):
    """One finished attempt to bring an adapter into a tier: outcome is "ok" or the error's code."""

    name: str
    tier: str
    seconds: float
    nbytes: int
    outcome: str


class StepStats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The worker's gauges after a step, and what happened since the last report.

    waiting_by_reason: waiting sequences by `scheduler.SkipReason` value. steps, prefill_tokens, decode_tokens,
    preemptions, prefix_hit_tokens, prefix_query_tokens, evictions: counters since the worker started.
    """

    running: int = 0
    waiting: int = 0
    waiting_by_reason: dict[str, int] = {}
    free_blocks: int = 0
    cached_blocks: int = 0
    steps: int = 0
    last_step_seconds: float = 0.0
    slowest_step_seconds: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    preemptions: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    adapters_host: int = 0
    adapters_gpu: int = 0
    adapter_host_bytes_used: int = 0
    adapter_gpu_bytes_used: int = 0
    adapter_evictions: int = 0
    adapter_loads: list[AdapterLoad] = []


class Progress(msgspec.Struct, frozen=True, tag=True):
    """A long step of the start: what is being done, and how far it is (0 to 1)."""

    what: str
    fraction: float = 0.0


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The worker takes commands from now on."""

    layout: EngineLayout
    version: int = PROTOCOL_VERSION


class StepStarted(msgspec.Struct, frozen=True, tag=True):
    """Heartbeat: a step began (busy) or the worker is idle. The front end's stall bound counts from it, and from every
    `Outputs` while the worker is busy: a step that follows one directly has no heartbeat of its own."""

    busy: bool


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """All outputs of one step in one message. `stats` comes first of all, without outputs, and then at least once a
    second while steps run."""

    outputs: list[SequenceOutput] = []
    stats: StepStats | None = None


class Fatal(msgspec.Struct, frozen=True, tag=True):
    """The worker cannot go on (or start) and exits after this message."""

    code: str
    message: str


Event = Progress | Ready | StepStarted | Outputs | Fatal

_command_decoder = msgspec.msgpack.Decoder(Command)
_event_decoder = msgspec.msgpack.Decoder(Event)
_encoder = msgspec.msgpack.Encoder()


def encode(message: Command | Event) -> bytes:
    """One frame: 4-byte little-endian body length, msgpack body."""
    body = _encoder.encode(message)
    return len(body).to_bytes(4, "little") + body


def decode_command(body: bytes) -> Command:
    """Decode a frame's body; a wrong type or unknown tag raises `msgspec.ValidationError` with its path."""
    return _command_decoder.decode(body)


def decode_event(body: bytes) -> Event:
    """Decode a frame's body; a wrong type or unknown tag raises `msgspec.ValidationError` with its path."""
    was_enabled = len(body) > _LARGE_BODY and gc.isenabled()
    if was_enabled:
        gc.disable()  # or it looks again and again at the millions of new tuples of a long prompt's logprobs
    try:
        return _event_decoder.decode(body)
    finally:
        if was_enabled:
            gc.enable()
