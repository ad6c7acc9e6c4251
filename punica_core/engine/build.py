"""Builds an engine from a configuration: the one place where the worker's parts are wired."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch
import transformers

from punica_core.adapters.format import ModelShapes
from punica_core.config import EngineConfig, EngineLayout
from punica_core.engine import noise
from punica_core.engine.engine import Engine, Runner
from punica_core.engine.gpu_build import build_gpu_parts, runs_on_tables
from punica_core.engine.runner import ModelRunner, allocate_kv_cache, lora_layout_bytes, plan_memory
from punica_core.engine.sampler import Sampler
from punica_core.errors import AdapterUnsupported, ConfigError
from punica_core.kv.block_pool import BlockPool
from punica_core.kv.prefix_cache import PrefixCache
from punica_core.lora.cache import AdapterCache
from punica_core.lora.gpu_tier import GpuAdapterTier
from punica_core.lora.packed import opener_for
from punica_core.lora.weights import OpenAdapter
from punica_core.model.loader import LoadedModel, load_model
from punica_core.protocol import AdapterRef
from punica_core.scheduler.limits import SchedulerLimits
from punica_core.scheduler.long_prompts import LongPrompts
from punica_core.scheduler.pacing import Pacer
from punica_core.scheduler.scheduler import Scheduler

CGROUP = Path("/sys/fs/cgroup")

ADAPTER_FRACTION = 0.25
"""Share of the free host memory that adapters may take when adapter_host_bytes is 0."""


def build_engine(
    config: EngineConfig,
    on_progress: Callable[[str, float], None],
    on_adapter_loaded: Callable[[], None],
    open_adapter: OpenAdapter | None = None,
    on_shapes: Callable[[ModelShapes], None] = lambda shapes: None,
) -> tuple[Engine, EngineLayout]:
    """Load the model, plan the memory, wire the parts. Raises ConfigError when that cannot work.

    on_adapter_loaded is called on a reader thread whenever an adapter load has ended. open_adapter: where adapters come
    from, by default their folders; benchmarks make them in memory. on_shapes: told what adapters must fit, before the
    weights are read.
    """
    device = resolve_device(config)
    if device.type == "cpu":
        refuse_unused(config)
    loaded = load_model(config, on_progress, device, on_shapes)
    on_tables = device.type == "cuda" and runs_on_tables(config, loaded)
    free_bytes = free_host_bytes()
    adapter_bytes = config.adapter_host_bytes or int(free_bytes * ADAPTER_FRACTION)
    host = AdapterCache(
        loaded.module_shapes,
        loaded.dtype,
        adapter_bytes,
        max_lora_rank=config.max_lora_rank,
        load_timeout=config.adapter_load_timeout,
        open_adapter=(open_adapter or opener_for(loaded.base_weights)) if config.lora else refuse_adapter,
        on_loaded=(lambda: None) if on_tables else on_adapter_loaded,  # the GPU tier listens to it, and tells
    )
    adapters: AdapterCache | GpuAdapterTier = host
    runner: Runner
    pacer = None
    if on_tables:
        parts = build_gpu_parts(config, loaded, host, on_progress, on_adapter_loaded)
        adapters, runner, num_blocks = parts.tier or host, parts.runner, parts.plan.num_blocks
        gpu_bytes = parts.plan.adapter_bytes
        pacer = Pacer.of(config, parts.runner.step_sizes)
    else:
        kv_room = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_bytes
        layout_bytes = lora_layout_bytes(config, adapter_bytes)
        num_blocks = plan_memory(config, loaded, max(kv_room - layout_bytes, 0))
        on_progress("allocating the KV cache", 0.95)
        sampler = Sampler(loaded.vocab_size, loaded.eos_token_ids, noise.engine_seed(config.seed))
        kv_cache = allocate_kv_cache(loaded, num_blocks)
        runner = ModelRunner(loaded, kv_cache, host.weights, sampler, layout_bytes=layout_bytes)
        gpu_bytes = 0
    layout = layout_of(loaded, num_blocks, adapter_bytes, gpu_bytes)
    pool = BlockPool(num_blocks)
    prefix_cache = PrefixCache(pool, layout.block_size) if config.prefix_cache else None
    long_prompts = LongPrompts.of(config, device.type)
    scheduler = Scheduler(SchedulerLimits.of(config, layout), pool, prefix_cache, adapters, pacer, long_prompts)
    return Engine(scheduler, adapters, runner), layout


def resolve_device(config: EngineConfig) -> torch.device:
    """Where the model runs. Raises ConfigError for a GPU that is asked for and not there."""
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            "device is cuda, but torch finds no NVIDIA GPU here: check `nvidia-smi`, and that torch is a CUDA build "
            f"(this one is {torch.__version__}); or choose auto or cpu.",
            param="device",
        )
    return torch.device("cuda", torch.cuda.current_device())


def refuse_unused(config: EngineConfig) -> None:
    """Raise ConfigError for keys that ask for what the CPU does not have, rather than serve without it or untested."""
    if config.dtype == "float16":
        raise ConfigError(
            "dtype is float16, but the model runs on the CPU, which serves float32 and bfloat16; choose auto or one of "
            "these.",
            param="dtype",
        )
    if config.sgmv == "cuda":
        raise ConfigError("sgmv is cuda, but the model runs on the CPU; choose auto or reference.", param="sgmv")
    if config.adapter_gpu_bytes:
        raise ConfigError(
            f"adapter_gpu_bytes is {config.adapter_gpu_bytes}, but adapters are kept on a GPU only where the CUDA "
            "kernels run; leave it at 0 and set adapter_host_bytes.",
            param="adapter_gpu_bytes",
        )


def refuse_adapter(ref: AdapterRef, shapes: ModelShapes, dtype: torch.dtype, max_lora_rank: int) -> NoReturn:
    """Implements `OpenAdapter` for a worker without LoRA."""
    raise AdapterUnsupported("this server serves the base model alone (lora is false).")


def layout_of(loaded: LoadedModel, num_blocks: int, host_bytes: int, gpu_bytes: int) -> EngineLayout:
    """What was computed from configuration and model, as it is reported to the front end."""
    return EngineLayout(
        model_dir=str(loaded.model_dir),
        architecture=loaded.architecture,
        device=str(loaded.device),
        dtype=str(loaded.dtype).removeprefix("torch."),
        vocab_size=loaded.vocab_size,
        eos_token_ids=loaded.eos_token_ids,
        max_model_len=loaded.max_model_len,
        num_blocks=num_blocks,
        base_bytes=loaded.base_bytes,
        adapter_host_bytes=host_bytes,
        adapter_gpu_bytes=gpu_bytes,
        torch_version=str(torch.__version__),
        transformers_version=str(transformers.__version__),
    )


def free_host_bytes(cgroup: Path = CGROUP) -> int:
    """Memory that can be had without swapping, in bytes; cgroup limits are respected where they are lower."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    available = max(available, _meminfo_available())
    return min(available, _cgroup_headroom(cgroup, default=available))


def _meminfo_available() -> int:
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    return 0


def _cgroup_headroom(cgroup: Path, default: int) -> int:
    """What the control group may still take. The files it has read (the model's, a moment ago) count as used until
    somebody wants their memory, so they are counted as free."""
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
        statistics = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        return max(limit - used + int(statistics.get("inactive_file", 0)), 0)
    except (OSError, ValueError):
        return default  # no cgroup v2, or "max"
