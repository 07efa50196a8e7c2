"""Whether gradient checkpointing is worth its price: a third more computation for a fraction of the memory."""

from __future__ import annotations

import os
import resource

import torch

TIGHT = 0.9
"""Share of the device's memory beyond which the next, longer row may not fit."""

LOOSE = 0.4
"""Share of the device's memory below which checkpointing costs time for nothing."""


def advice(*, checkpointing: bool, peak: int, available: int) -> str | None:
    """What to change, None when all is well. `peak` and `available` are bytes: used at most, and there."""
    share = peak / available
    if not checkpointing and share > TIGHT:
        return (
            f"training takes {share:.0%} of the device's memory. If it runs out, set "
            "optimizer.gradient_checkpointing = true, or lower optimizer.token_budget"
        )
    if checkpointing and share < LOOSE:
        return (
            f"training takes {share:.0%} of the device's memory: set optimizer.gradient_checkpointing = false, which "
            "saves about a third of the computation, or raise optimizer.token_budget"
        )
    return None


def peak_bytes(device: torch.device) -> int:
    """The most memory that was in use on `device`; on a CPU, by this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def available_bytes(device: torch.device) -> int:
    """All the memory there is on `device`."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
