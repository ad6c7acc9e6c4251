"""Builds the part of an engine that runs on an NVIDIA GPU: attention, adapters, memory, compiled code, graphs."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch._inductor.config as inductor
from torch import Tensor

from punica_core.config import BLOCK_SIZE, EngineConfig
from punica_core.engine import device_memory, noise
from punica_core.engine.device_runner import DeviceRunner
from punica_core.engine.device_sampler import DeviceSampler, scratch_bytes
from punica_core.engine.forward import ModelForward
from punica_core.engine.graphs import GraphSizes
from punica_core.engine.memory_plan import MemoryDemand, MemoryPlan, graph_bytes, plan_gpu_memory
from punica_core.engine.runner import allocate_kv_cache, kv_bytes_per_block
from punica_core.engine.step_batch import StepPacker
from punica_core.engine.step_limits import StepLimits
from punica_core.errors import ConfigError
from punica_core.lora.arena_writer import device_bytes
from punica_core.lora.cache import AdapterCache
from punica_core.lora.gpu_tier import NUM_SLOTS, GpuAdapterTier
from punica_core.lora.table_modules import TableModules
from punica_core.lora.table_step import TableLoRA, bind_tables, lora_orders, most_inside_rows
from punica_core.lora.tables import AdapterTables, Arena
from punica_core.lora.vocabulary_step import VocabularyStep
from punica_core.model.attention_op import GatheredAttention, OpAttention
from punica_core.model.flashinfer import FlashInferAttention, attends_whole, unsupported_reason
from punica_core.model.loader import LoadedModel
from punica_core.ops import cuda
from punica_core.ops.build import BuildError
from punica_core.ops.layout import MAX_RANK
from punica_core.scheduler.limits import max_scored_tokens

logger = logging.getLogger(__name__)

COMPILE_CACHE = Path.home() / ".cache" / "punica" / "compiled"
"""Where torch keeps what it compiled, unless TORCHINDUCTOR_CACHE_DIR says otherwise."""

Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class GpuParts:
    """What an engine on a GPU is made of. tier: None without LoRA."""

    runner: DeviceRunner
    tier: GpuAdapterTier | None
    plan: MemoryPlan


def runs_on_tables(config: EngineConfig, loaded: LoadedModel) -> bool:
    """Whether the GPU's own runner serves: in 16 bits, unless plain torch is asked for.

    Raises ConfigError for what is asked for and cannot be.
    """
    is_half = loaded.dtype in (torch.bfloat16, torch.float16)
    if config.sgmv == "cuda" and not is_half:
        raise ConfigError(
            f"sgmv is cuda, but the kernels take bfloat16 and float16, and dtype is {loaded.dtype}.", param="sgmv"
        )
    if is_half and config.sgmv != "reference":
        return True
    logger.warning("LoRA and attention run in plain torch on the GPU: for debugging, not for speed.")
    return False


def build_gpu_parts(
    config: EngineConfig,
    loaded: LoadedModel,
    host: AdapterCache,
    on_progress: Progress,
    on_adapter_loaded: Callable[[], None],
) -> GpuParts:
    """Measure, plan and allocate the memory; compile and capture. After it nothing is compiled and memory stays put.

    Raises ConfigError when the memory does not suffice, or for what is missing or unsupported.
    """
    load_kernels(config)
    prepare_compiler()
    device = loaded.device
    device_memory.held_bytes(device)  # gives back what fusing the projections left behind
    builder = _Builder(config, loaded)
    on_progress("compiling the model's layers", 0.85)
    activations = builder.measure_activations()
    sizes = builder.sizes
    demand = MemoryDemand(
        total=device_memory.total_bytes(device),
        elsewhere=device_memory.bytes_elsewhere(device),
        weights=loaded.base_bytes,
        activations=activations + builder.mask_bytes,
        workspace=device_memory.held_bytes(device) - loaded.base_bytes + builder.later_bytes,
        graphs=graph_bytes(sizes.num_graphs(lora=config.lora), loaded.kv_shape.num_layers),
        block_bytes=kv_bytes_per_block(loaded) + builder.gathered_block_bytes,
        max_model_len=loaded.max_model_len,
    )
    plan = plan_gpu_memory(config, demand)
    for line in plan.describe():
        logger.info(line)
    if sizes.inside_rows:
        logger.info(
            "Steps of at most %d rows with few adapters compute a layer and its LoRA in one kernel", sizes.inside_rows
        )
    tier = None
    if config.lora:
        tier = GpuAdapterTier(
            host,
            builder.modules,
            plan.adapter_bytes,
            dtype=loaded.dtype,
            device=device,
            on_loaded=on_adapter_loaded,
        )
    runner = builder.build(plan.num_blocks, tier)
    on_progress("capturing CUDA graphs", 0.92)
    builder.capture(runner, on_progress)
    return GpuParts(runner, tier, plan)


def load_kernels(config: EngineConfig) -> None:
    """Register the SGMV kernels. Raises ConfigError for a rank they do not reach, or if there are none."""
    if config.lora and config.max_lora_rank > MAX_RANK:
        raise ConfigError(
            f"max_lora_rank is {config.max_lora_rank}; the kernels serve ranks up to {MAX_RANK}. Lower it, or set "
            "`sgmv: reference`.",
            param="max_lora_rank",
        )
    try:
        cuda.load()
    except BuildError as error:
        raise ConfigError(str(error), param="sgmv") from error


def prepare_compiler() -> None:
    """Have torch keep what it compiles where a later start finds it."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(COMPILE_CACHE))
    # Kernels start before the one before them has ended, unless the environment decides.
    if hasattr(inductor.triton, "enable_pdl") and "TORCHINDUCTOR_ENABLE_PDL" not in os.environ:
        inductor.triton.enable_pdl = torch.cuda.get_device_capability() >= (9, 0)
    warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores", category=UserWarning)


def logits_bytes(num_rows: int, max_num_batched_tokens: int, vocab_size: int, itemsize: int) -> int:
    """Of the graphs' output [num_rows, V], what sampling so many rows takes for a while, and the logits of scored
    prompt tokens, which are kept until a step is collected: of two steps, as one runs ahead."""
    num_scored = min(max_scored_tokens(vocab_size), max_num_batched_tokens)
    return (num_rows + 2 * num_scored) * vocab_size * itemsize + scratch_bytes(num_rows, vocab_size)


class _Builder:
    """The parts, first with a cache and an arena that only just suffice to measure a step, then with the real ones."""

    def __init__(self, config: EngineConfig, loaded: LoadedModel) -> None:
        self._config = config
        self._loaded = loaded
        self._max_seqs = config.max_num_seqs
        head_bias = None if loaded.head is None else loaded.base_weights.bias(loaded.head.paths[0])
        self.modules = TableModules(loaded.groups, loaded.head, head_bias)
        reason = unsupported_reason(loaded.dtype, loaded.kv_shape.head_dim)
        if reason is not None:
            logger.warning(
                "Attention runs in plain torch and without CUDA graphs, since FlashInfer cannot: %s.", reason
            )
        has_graphs = config.cuda_graphs and reason is None
        budget = config.max_num_batched_tokens
        cache = allocate_kv_cache(loaded, 1)  # in the end it has one block more than the plan: it is measured with it
        whole_mixed = attends_whole(cache, loaded.num_heads)
        inside_rows = most_inside_rows(loaded.groups, loaded.device) if config.lora else 0
        self.sizes = GraphSizes()
        if has_graphs:
            self.sizes = GraphSizes.of(config.max_num_seqs, budget, whole_mixed=whole_mixed, inside_rows=inside_rows)
        self._limits = StepLimits.of(config, self.sizes.largest, loaded.max_model_len)
        if reason is None:
            largest = self.sizes.largest
            self._attention: FlashInferAttention | GatheredAttention = FlashInferAttention(
                cache,
                loaded.num_heads,
                loaded.attention_specs,
                max(self._max_seqs, largest.num_decode),
                max_prompt_rows=largest.num_prompt_rows,
                max_prompts=largest.num_prompts,
            )
        else:
            self._attention = GatheredAttention(cache, loaded.attention_specs)
        self._op = OpAttention(self._attention)
        self._sampler = DeviceSampler(loaded.vocab_size, loaded.eos_token_ids, noise.engine_seed(config.seed))

    @property
    def later_bytes(self) -> int:
        """Of what is made only after the plan, besides cache, arena and graphs."""
        return self.logits_bytes + self.table_bytes + self.step_bytes

    @property
    def logits_bytes(self) -> int:
        """Of the logits that outlast the layers, and of what sampling takes beside them."""
        rows = max(self._max_seqs, self.sizes.largest.num_logits)
        dtype, vocab_size = self._loaded.dtype, self._loaded.vocab_size
        return logits_bytes(rows, self._config.max_num_batched_tokens, vocab_size, int(dtype.itemsize))

    @property
    def gathered_block_bytes(self) -> int:
        """What attention in plain torch takes besides a KV block: at most twice its part in one layer, in a copy."""
        if isinstance(self._attention, FlashInferAttention):
            return 0
        return 2 * kv_bytes_per_block(self._loaded) // self._loaded.kv_shape.num_layers

    @property
    def mask_bytes(self) -> int:
        """Of the masks of attention in plain torch, for a chunk of a prompt of full length: as bool and as numbers."""
        if isinstance(self._attention, FlashInferAttention):
            return 0
        scores = self._config.max_num_batched_tokens * self._loaded.max_model_len
        return scores * (1 + int(self._loaded.dtype.itemsize))

    @property
    def step_bytes(self) -> int:
        """Of the buffers that describe a step."""
        return self._limits.device_bytes(lora=self._config.lora)

    @property
    def table_bytes(self) -> int:
        """Of the adapters' tables."""
        return device_bytes(self.modules.count, NUM_SLOTS) if self._config.lora else 0

    def measure_activations(self) -> int:
        """Bytes that a step of full size takes at its peak. Compiles what prompts need."""
        loaded = self._loaded
        arena = Arena(16, dtype=loaded.dtype, device=loaded.device)
        tables = AdapterTables(self.modules.count, 1, device=loaded.device)
        lora = self._lora(tables, arena) if self._config.lora else None
        runner = self._runner(lora, padding_block=0)

        def run() -> None:
            rows = self._config.max_num_batched_tokens
            for order in lora_orders(rows, lora=lora is not None):
                runner.warm_up(rows, order)

        run()  # what compiling takes is no part of a step
        return device_memory.peak_bytes(loaded.device, run)

    def build(self, num_blocks: int, tier: GpuAdapterTier | None) -> DeviceRunner:
        """The runner with a cache of `num_blocks` blocks, and one more that padding reads."""
        self._attention.set_cache(allocate_kv_cache(self._loaded, num_blocks + 1))
        if tier is None:
            return self._runner(None, padding_block=num_blocks)
        lora = self._lora(tier.tables, tier.arena)
        vocabulary = VocabularyStep(
            lora,
            tier.tables,
            tier.arena,
            self.modules,
            tier.vocabulary,
            max_rows=self._limits.max_rows,
            max_segments=self._limits.max_segments,
        )
        return self._runner(lora, vocabulary, padding_block=num_blocks)

    def capture(self, runner: DeviceRunner, on_progress: Progress) -> None:
        """Capture all steps, the largest first."""
        if not self.sizes.decode:
            return
        rows, loaded = self.sizes.largest.num_logits, self._loaded
        logits: Tensor = torch.empty(rows, loaded.vocab_size, dtype=loaded.dtype, device=loaded.device)
        try:
            runner.capture(self.sizes, logits, lambda share: on_progress("capturing CUDA graphs", 0.92 + 0.08 * share))
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                "The GPU's memory was used up while CUDA graphs were captured; something else may have taken some "
                f"meanwhile. Lower gpu_memory_fraction ({self._config.gpu_memory_fraction:g}) or max_num_seqs "
                f"({self._config.max_num_seqs}), or set cuda_graphs to false. {error}",
                param="gpu_memory_fraction",
            ) from error

    def _lora(self, tables: AdapterTables, arena: Arena) -> TableLoRA:
        bind_tables(self._loaded.model, self.modules, tables)
        # The kernel for a layer and its LoRA is compiled where it is captured.
        limits = self._limits
        return TableLoRA(
            tables,
            arena,
            max_rows=limits.max_rows,
            max_rank=limits.max_rank,
            beside=True,
            inside_rows=self.sizes.inside_rows,
        )

    def _runner(
        self, lora: TableLoRA | None, vocabulary: VocabularyStep | None = None, *, padding_block: int
    ) -> DeviceRunner:
        loaded, limits = self._loaded, self._limits
        packer = StepPacker(
            loaded.device,
            block_size=BLOCK_SIZE,
            largest=limits.largest,
            max_blocks=limits.max_blocks,
            padding_block=padding_block,
        )
        forward = ModelForward(loaded, self._op, lora, vocabulary, compiled=self._config.compile)
        return DeviceRunner(packer, self._attention, lora, forward, self._sampler, vocabulary)
