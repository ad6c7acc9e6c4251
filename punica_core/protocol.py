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
import functools
import struct
from array import array
from collections.abc import Iterator, Sequence

import msgspec

from punica_core.adapters.shapes import ModelShapes
from punica_core.config import EngineConfig, EngineLayout

PROTOCOL_VERSION = 5
MAX_FRAME_BYTES = 256 * 1024 * 1024
MAX_LOGPROBS = 1 << 22
"""Log-probabilities that one sequence, and one request over all its sequences, may be given: of scored prompt tokens
and of generated ones, each with its alternatives. They take 8 bytes each on the wire and in the front end, so that what
is told of one sequence always fits a frame."""

_VALUE_BYTES = 4


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

    def num_logprobs(self, num_prompt: int) -> int:
        """Logprobs that a sequence can be given at most, alternatives included."""
        scored = 0 if self.prompt_logprobs is None else num_prompt * (1 + self.prompt_logprobs)
        return scored + (0 if self.logprobs is None else self.max_tokens * (1 + self.logprobs))


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


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Is the worker's loop alive? The answer is `Outputs` with the gauges as they are."""


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Exit at once (the front end has drained)."""


Command = Configure | Submit | Cancel | Forget | Ping | Shutdown


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities (natural log) at one position, of the raw logits before bias, penalties and temperature.

    logprob: of the token itself; top: (token id, logprob) pairs, best first.
    """

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = []


@functools.cache
def _forms(width: int) -> tuple[struct.Struct, struct.Struct]:
    """A row's token ids and logprobs."""
    return struct.Struct(f"<{width}i"), struct.Struct(f"<{width}f")


class LogprobTable(msgspec.Struct, array_like=True, gc=False):
    """Logprobs of consecutive tokens, each with as many alternatives: a sequence of `TokenLogprobs`, in 8 bytes a value
    where objects take some 110.

    width: 1 + number of alternatives. token_ids, values: int32 and fp32 [n, width], little-endian: of the token itself,
    then of the alternatives, best first.
    """

    width: int = 1
    token_ids: bytearray = msgspec.field(default_factory=bytearray)
    values: bytearray = msgspec.field(default_factory=bytearray)

    @classmethod
    def of(cls, entries: Sequence[TokenLogprobs]) -> LogprobTable:
        """Raises ValueError unless all entries have as many alternatives."""
        table = cls(1 + len(entries[0].top)) if entries else cls()
        form = _forms(table.width)
        for entry in entries:
            if 1 + len(entry.top) != table.width:
                raise ValueError(f"{len(entry.top)} alternatives among entries of {table.width - 1}")
            table.token_ids += form[0].pack(entry.token_id, *[token_id for token_id, _ in entry.top])
            table.values += form[1].pack(entry.logprob, *[logprob for _, logprob in entry.top])
        return table

    def __len__(self) -> int:
        return len(self.token_ids) // (_VALUE_BYTES * self.width)

    @property
    def num_values(self) -> int:
        """Logprobs of all tokens, alternatives included."""
        return len(self.token_ids) // _VALUE_BYTES

    def __iter__(self) -> Iterator[TokenLogprobs]:
        form = _forms(self.width)
        for ids, values in zip(form[0].iter_unpack(self.token_ids), form[1].iter_unpack(self.values), strict=True):
            pairs = [*zip(ids, values, strict=True)]
            token_id, logprob = pairs.pop(0)
            yield TokenLogprobs(token_id, logprob, pairs)

    def extend(self, other: LogprobTable) -> None:
        """Append the rows of a table of the same width; an empty one takes any."""
        if not self.token_ids:
            self.width = other.width
        elif other.width != self.width and other.token_ids:
            raise ValueError(f"rows of width {other.width} behind those of {self.width}")
        self.token_ids += other.token_ids
        self.values += other.values

    def part(self, start: int, stop: int) -> LogprobTable:
        """A copy of the rows from start to before stop."""
        row = _VALUE_BYTES * self.width
        cut = slice(start * row, stop * row)
        return LogprobTable(self.width, self.token_ids[cut], self.values[cut])

    @property
    def own(self) -> Sequence[float]:
        """The logprob of each token itself."""
        return array("f", self.values)[:: self.width]  # the machines that we run on are little-endian


class SequenceOutput(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """What a step produced for one sequence.

    token_ids: new tokens, in order; a stop id that ended the sequence is the last of them.
    logprobs: one entry per new token if asked for. prompt_logprobs: once, with the first output: entry i is of the
    prompt's token at position 1 + i, since the first token has none.
    stop_token_id: the stop id that ended the sequence, if one did.
    error_code, error_message: with finish_reason ERROR (see errors.from_wire).
    cached_tokens: prompt tokens read from the prefix cache (reported with the first token).
    adapter_key: content digest of the adapter used (reported with the first token), "" for the base model.
    """

    request_id: int
    token_ids: list[int] = []
    finish_reason: FinishReason | None = None
    logprobs: LogprobTable | None = None
    prompt_logprobs: LogprobTable | None = None
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
    """A long step of the start: what is being done, and how far it is (0 to 1).

    shapes: what adapters must fit, told once, as soon as it is known.
    """

    what: str
    fraction: float = 0.0
    shapes: ModelShapes | None = None


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The worker takes commands from now on."""

    layout: EngineLayout
    version: int = PROTOCOL_VERSION


class StepStarted(msgspec.Struct, frozen=True, tag=True):
    """Heartbeat: a step began (busy) or the worker is idle. The front end's stall bound counts from it, and from every
    `Outputs` while the worker is busy: a step that follows one directly has no heartbeat of its own. An idle worker
    sends none; it is pinged."""

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


def event_frames(event: Event) -> list[bytes]:
    """The event as one frame, or outputs that would exceed what a frame may hold as several, in order."""
    frame = encode(event)
    if len(frame) - 4 <= MAX_FRAME_BYTES or not isinstance(event, Outputs) or len(event.outputs) < 2:
        return [frame]
    half = len(event.outputs) // 2
    parts = Outputs(event.outputs[:half]), Outputs(event.outputs[half:], event.stats)
    return [frame for part in parts for frame in event_frames(part)]


def decode_command(body: bytes) -> Command:
    """Decode a frame's body; a wrong type or unknown tag raises `msgspec.ValidationError` with its path."""
    return _command_decoder.decode(body)


def decode_event(body: bytes) -> Event:
    """Decode a frame's body; a wrong type or unknown tag raises `msgspec.ValidationError` with its path."""
    return _event_decoder.decode(body)
