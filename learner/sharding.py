"""One policy on all GPUs of a node: its layers sharded (FSDP2), its rows shared out, its gradients added up.

The frozen base is what takes the memory, so each layer of it is sharded and gathered when it computes. The adapter is
megabytes: every process has all of it, and its gradient is summed over the processes. So each holds the same adapter
and the same optimizer state, bit for bit, and whatever is saved on one is the whole.

Processes are started by torchrun, on one node; between machines nothing of this kind is ever spoken.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

T = TypeVar("T")

QUIET = timedelta(days=365)
"""How long the first process may have nothing to tell. One that died is noticed at once: its connection is closed."""


def processes() -> int:
    """How many processes torchrun started for this learner; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@dataclass(frozen=True, slots=True)
class Shards:
    """This process's place among the node's."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    calls: dist.ProcessGroup
    """For what the first process tells: the others wait for its next call as long as a paused run takes."""

    @classmethod
    def join(cls) -> Shards:
        """Meet the other processes of the node, by the environment that torchrun sets. One GPU each, or the CPU."""
        rank, size, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        device = torch.device(kind, local) if kind == "cuda" else torch.device(kind)
        if kind == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if kind == "cuda" else "gloo", rank=rank, world_size=size)
        calls = dist.new_group(backend="gloo", timeout=QUIET)
        return cls(rank, size, device, init_device_mesh(kind, (size,)), calls)

    def leave(self) -> None:
        dist.destroy_process_group()

    def spread(self, layers: Iterable[nn.Module], whole: Sequence[nn.Parameter]) -> None:
        """Shard the parameters of each layer, but for those that are to stay `whole`."""
        for layer in layers:
            fully_shard(layer, mesh=self.mesh, reshard_after_forward=True, ignored_params=set(whole))

    def own(self, items: Sequence[T]) -> list[T | None]:
        """This process's share. All have equally many, since all layers are gathered together: None fills up."""
        rounds = -(-len(items) // self.size)
        mine = range(self.rank, rounds * self.size, self.size)
        return [items[index] if index < len(items) else None for index in mine]

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over the processes."""
        flat = torch.cat([tensor.detach().flatten().to(torch.float32) for tensor in tensors])
        dist.all_reduce(flat)
        for tensor, total in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
            tensor.detach().copy_(total.view_as(tensor))

    def tell(self, data: bytes) -> None:
        """From the first process to the others."""
        dist.broadcast(torch.tensor([len(data)], dtype=torch.int64), 0, group=self.calls)
        dist.broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8), 0, group=self.calls)

    def hear(self) -> bytes:
        """What the first process tells; waits for it."""
        size = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(size, 0, group=self.calls)
        data = torch.zeros(int(size.item()), dtype=torch.uint8)
        dist.broadcast(data, 0, group=self.calls)
        return data.numpy().tobytes()
