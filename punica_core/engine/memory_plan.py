"""Who gets how much of a GPU's memory: numbers in, a frozen plan or a refusal that says what to change. No torch.

    total · gpu_memory_fraction = elsewhere + weights + activations + workspace + graphs + adapters + KV blocks

What was measured is taken first (weights, the activations of a dry step of full size, buffers); graphs are estimated,
for they can be captured only when all the rest is in place. Of what is left, adapters get what was asked for, else
ADAPTER_SHARE, and the KV cache the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

from punica_core.config import BLOCK_SIZE, EngineConfig
from punica_core.errors import ConfigError

ADAPTER_SHARE = 0.25
"""Part of what weights and steps leave that adapters get when adapter_gpu_bytes is 0.

An adapter of rank 16 on all projections of an 8B model takes 84 MB, as much as the KV of 640 tokens: a quarter keeps
one such adapter for every 1,900 tokens, which is more adapters than sequences that could use them at once.
"""

MIN_ADAPTER_BYTES = 64 * 1024 * 1024
"""With less than this no adapter of a usual size could come in, so the server would refuse them all."""

GRAPH_LAYER_BYTES = 192 * 1024
"""Device memory of one layer in one captured graph: its kernels' nodes and parameters. An estimate to the safe side:
152 graphs of 32 layers took about 0.5 GB on an H200."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryDemand:
    """What is known before the plan, in bytes.

    total: of the device. elsewhere: used by others, and by the CUDA context. weights, workspace: there already.
    activations: what a step of max_num_batched_tokens takes at its peak besides. graphs: see `graph_bytes`.
    block_bytes: of one KV block in all layers. max_model_len: tokens of the longest sequence.
    """

    total: int
    elsewhere: int
    weights: int
    activations: int
    workspace: int
    graphs: int
    block_bytes: int
    max_model_len: int

    @property
    def fixed(self) -> int:
        return self.elsewhere + self.weights + self.activations + self.workspace + self.graphs


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """demand: what it was made for. budget, adapter_bytes: bytes. num_blocks: KV blocks."""

    demand: MemoryDemand
    budget: int
    adapter_bytes: int
    num_blocks: int

    @property
    def kv_bytes(self) -> int:
        return self.num_blocks * self.demand.block_bytes

    @property
    def num_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return self.num_blocks * BLOCK_SIZE

    @property
    def spare_bytes(self) -> int:
        """Of the budget, what nobody was given."""
        return self.budget - self.demand.fixed - self.adapter_bytes - self.kv_bytes

    def describe(self) -> list[str]:
        """The plan in lines, to be logged at start."""
        demand = self.demand
        rows = [
            ("used elsewhere", demand.elsewhere, ""),
            ("weights", demand.weights, ""),
            ("activations", demand.activations, "a step of full size"),
            ("workspace", demand.workspace, "tables and buffers"),
            ("graphs", demand.graphs, "estimated"),
            ("adapters", self.adapter_bytes, ""),
            ("KV cache", self.kv_bytes, f"{self.num_tokens:,} tokens in {self.num_blocks:,} blocks"),
            ("spare", self.spare_bytes, ""),
        ]
        lines = [f"  {name:<15}{amount(size):>11}{'  ' + note if note else ''}" for name, size, note in rows if size]
        return [f"GPU memory: {amount(self.budget)} of {amount(demand.total)}", *lines]


def plan_gpu_memory(config: EngineConfig, demand: MemoryDemand) -> MemoryPlan:
    """Share out the device's memory.

    Raises `ConfigError`, whose param is the key to change first, if there is no room for weights and steps, for the
    adapters asked for, or for the KV of one sequence of full length.
    """
    budget = int(demand.total * config.gpu_memory_fraction)
    _check_fixed(config, demand, budget)
    rest = budget - demand.fixed
    _check_longest(config, demand, rest)
    adapter_bytes = _adapter_bytes(config, demand, rest)
    return MemoryPlan(demand, budget, adapter_bytes, _num_blocks(config, demand, rest - adapter_bytes))


def graph_bytes(num_graphs: int, num_layers: int) -> int:
    """An estimate of what captured graphs take that share one pool, without their activations."""
    return num_graphs * num_layers * GRAPH_LAYER_BYTES


def amount(nbytes: int) -> str:
    """Bytes for people: "15.0 GiB", "3.5 MiB"."""
    if abs(nbytes) >= 2**30:
        return f"{nbytes / 2**30:.1f} GiB"
    return f"{nbytes / 2**20:.1f} MiB"


def _check_fixed(config: EngineConfig, demand: MemoryDemand, budget: int) -> None:
    share = f"{amount(budget)} (gpu_memory_fraction {config.gpu_memory_fraction:g} of {amount(demand.total)})"
    used = demand.elsewhere + demand.weights
    if used > budget:
        raise ConfigError(
            f"The weights need {amount(demand.weights)} and {amount(demand.elsewhere)} of GPU memory are used "
            f"elsewhere, but the worker may use {share}: raise gpu_memory_fraction, end what else uses the GPU, or "
            "serve a smaller model.",
            param="gpu_memory_fraction",
        )
    if demand.fixed > budget:
        raise ConfigError(
            f"Weights and other users leave {amount(budget - used)} of {share}, but a step needs "
            f"{amount(demand.activations)}, its buffers {amount(demand.workspace)} and its graphs "
            f"{amount(demand.graphs)}: lower max_num_batched_tokens ({config.max_num_batched_tokens}) or max_num_seqs "
            f"({config.max_num_seqs}), or raise gpu_memory_fraction.",
            param="max_num_batched_tokens",
        )


def _check_longest(config: EngineConfig, demand: MemoryDemand, rest: int) -> None:
    """One sequence of full length must fit `rest`, the bytes that steps leave, beside the smallest adapter tier."""
    least = min(config.adapter_gpu_bytes or MIN_ADAPTER_BYTES, MIN_ADAPTER_BYTES) if config.lora else 0
    longest = _longest_bytes(demand)
    if longest + least <= rest:
        return
    tokens = max(rest - least, 0) // demand.block_bytes * BLOCK_SIZE
    fix = f"lower max_model_len to at most {tokens}, " if tokens else ""
    beside = f" beside {amount(least)} for adapters" if least else ""
    raise ConfigError(
        f"The KV cache of one sequence of max_model_len {demand.max_model_len} tokens needs {amount(longest)}{beside}, "
        f"but {amount(rest)} of GPU memory are left: {fix}lower max_num_batched_tokens "
        f"({config.max_num_batched_tokens}), or raise gpu_memory_fraction ({config.gpu_memory_fraction:g}).",
        param="max_model_len",
    )


def _adapter_bytes(config: EngineConfig, demand: MemoryDemand, rest: int) -> int:
    """What was asked for, else a share of `rest` that leaves the KV cache what it must have or was asked for."""
    if not config.lora:
        return 0
    room = rest - _longest_bytes(demand)
    if not config.adapter_gpu_bytes:
        asked = config.kv_tokens // BLOCK_SIZE * demand.block_bytes
        return max(min(int(rest * ADAPTER_SHARE), room, rest - asked), MIN_ADAPTER_BYTES)
    if config.adapter_gpu_bytes > room:
        raise ConfigError(
            f"adapter_gpu_bytes is {amount(config.adapter_gpu_bytes)}, but {amount(rest)} of GPU memory are left, of "
            f"which the KV cache needs {amount(rest - room)} for one sequence of full length: lower adapter_gpu_bytes "
            f"to at most {room // 2**20}MiB, or lower max_model_len ({demand.max_model_len}).",
            param="adapter_gpu_bytes",
        )
    return config.adapter_gpu_bytes


def _num_blocks(config: EngineConfig, demand: MemoryDemand, room: int) -> int:
    """KV blocks: of kv_tokens, else all that fit `room`."""
    fitting = room // demand.block_bytes
    if not config.kv_tokens:
        return fitting
    blocks = config.kv_tokens // BLOCK_SIZE
    if blocks * BLOCK_SIZE < demand.max_model_len:
        raise ConfigError(
            f"The KV cache has room for {blocks * BLOCK_SIZE} tokens, but one sequence may have "
            f"{demand.max_model_len}: raise kv_tokens or lower max_model_len.",
            param="kv_tokens",
        )
    if blocks > fitting:
        raise ConfigError(
            f"kv_tokens is {config.kv_tokens}, which takes {amount(blocks * demand.block_bytes)}, but {amount(room)} "
            f"of GPU memory are left for the KV cache: lower kv_tokens to at most {fitting * BLOCK_SIZE}"
            + (", or lower adapter_gpu_bytes." if config.adapter_gpu_bytes else "."),
            param="kv_tokens",
        )
    return blocks


def _longest_bytes(demand: MemoryDemand) -> int:
    """Of the KV of one sequence of full length."""
    return -(-demand.max_model_len // BLOCK_SIZE) * demand.block_bytes
