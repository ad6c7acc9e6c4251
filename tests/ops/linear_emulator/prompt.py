"""``lora_shrink`` of prompts on a CPU: what the binding does, for tensors that lie there."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from punica_core.ops.layout import NUM_COUNTERS
from tests.ops.emulator import _Scratch, _ShrinkParams, _tables
from tests.ops.linear_emulator import _MAP_WORDS, KernelFailed, _Map
from tests.support.lora_batch import LoraBatch

PROMPT_KERNELS = Path(__file__).with_name("prompt.cpp")
LARGE_CLUSTER = 8
SMALL_CLUSTER = 4
MUCH_ROOM = 1000


class PromptRoom:
    """The choice of clusters on GPUs that have room for some."""

    def __init__(self, library: Path) -> None:
        self._kernels = ctypes.CDLL(str(library))

    def set(self, large: int, small: int) -> None:
        """For the devices that are asked from now on: clusters of either size at the same time."""
        self._kernels.set_prompt_room(large, small)

    def clusters(self, num_rows: int, device: int, *, num_blocks: int = 264) -> tuple[int, int]:
        """Blocks of a cluster, and how many clusters, of a step of so many rows."""
        count = ctypes.c_int()
        return self._kernels.prompt_clusters_of(num_rows, num_blocks, device, ctypes.byref(count)), count.value

    @property
    def times_asked(self) -> int:
        return int(self._kernels.times_asked_for_prompt_room())


class _PromptParams(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_uint64 * _MAP_WORDS),
        ("tall_x", ctypes.c_uint64 * _MAP_WORDS),
        ("a", ctypes.c_uint64 * _MAP_WORDS),
        ("tall_a", ctypes.c_uint64 * _MAP_WORDS),
        ("shrink", _ShrinkParams),
        ("a_shift", ctypes.c_int64),
        ("padding", ctypes.c_int * 16),
    )


def emulated_prompt_shrink(
    library: Path, batch: LoraBatch, *, num_clusters: int = 2, cluster_blocks: int = LARGE_CLUSTER, seed: int = 0
) -> None:
    """As ``ops.lora_shrink(batch.v, batch.x, …, summed=True)``, in clusters of so many blocks.

    Raises:
        ValueError: the kernel does not take such a step.
        KernelFailed: a thread did what it must not, or they wait for each other for ever.
    """
    kernels = ctypes.CDLL(str(library))
    kernels.prompt_failure.restype = ctypes.c_char_p
    rows, plan = len(batch.x), batch.plan.plan
    parts = batch.v[rows * len(batch.out_features) * batch.max_rank // 2 :]
    counters = plan[len(plan) - NUM_COUNTERS :]
    num_blocks = num_clusters * cluster_blocks
    # A GPU that has room for clusters of that size alone.
    kernels.set_prompt_room(*(MUCH_ROOM if size == cluster_blocks else 0 for size in (LARGE_CLUSTER, SMALL_CLUSTER)))
    places = (batch.v.data_ptr(), parts.data_ptr(), counters.data_ptr())
    scratch = _Scratch(*places, rows, 1, num_blocks, batch.max_rank, True)
    # The parameters begin on 64 bytes.
    memory = ctypes.create_string_buffer(ctypes.sizeof(_PromptParams) + 64)
    params = _PromptParams.from_buffer(memory, -ctypes.addressof(memory) % 64)
    params.shrink = _ShrinkParams(_tables(batch), scratch, batch.x.data_ptr(), batch.x.stride(0), batch.x.size(1))
    is_bf16 = int(batch.x.dtype == torch.bfloat16)
    arena_elements = ctypes.c_int64(batch.arena.buffer.numel())
    x = ctypes.byref(_Map.of(batch.x))
    outcome = kernels.prompt(is_bf16, ctypes.byref(params), x, arena_elements, cluster_blocks, ctypes.c_uint(seed))
    if outcome == 1:
        raise ValueError("the kernel does not take it")
    if outcome:
        raise KernelFailed(kernels.prompt_failure().decode())
