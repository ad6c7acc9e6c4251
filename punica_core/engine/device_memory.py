"""What a GPU says of its memory, for the plan that shares it out."""

from __future__ import annotations

from collections.abc import Callable

import torch


def total_bytes(device: torch.device) -> int:
    """Of the whole device."""
    return int(torch.cuda.mem_get_info(device)[1])


def bytes_elsewhere(device: torch.device) -> int:
    """Used by other processes, by this one's CUDA context and by libraries that allocate for themselves."""
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free - torch.cuda.memory_reserved(device))


def held_bytes(device: torch.device) -> int:
    """Held by this process's tensors, rounding included; what torch only kept for later is given back first."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return int(torch.cuda.memory_reserved(device))


def peak_bytes(device: torch.device, run: Callable[[], object]) -> int:
    """What `run` takes at its peak besides what is held, and what the libraries it loads keep. Synchronises."""
    held = held_bytes(device)
    outside = bytes_elsewhere(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    peak = int(torch.cuda.max_memory_reserved(device)) - held
    return peak + max(bytes_elsewhere(device) - outside, 0)
