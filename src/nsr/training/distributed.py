"""One run over several processes: who is who, how they share a batch, and what only one of them may do.

``torchrun --nproc-per-node N -m nsr run …`` starts the processes and ends all of them when one dies. Each takes its
share of every batch, gradients are averaged by DistributedDataParallel, and sums over the group are exact: a run has
the same steps, the same learning rates and the same metrics whatever the number of processes.
"""

import atexit
import os
from dataclasses import dataclass, field
from datetime import timedelta

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

_PATIENCE = timedelta(minutes=10)  # how long a process waits for the others before it gives up


@dataclass(frozen=True)
class Group:
    """The processes of a run, as one of them sees it; by default a run has only one.

    Attributes:
        rank: Which one this is.
        size: How many there are.
        device: Where this one computes.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def writes(self) -> bool:
        """Whether this process writes results and checkpoints, and speaks: exactly one does."""
        return self.rank == 0

    def share(self, count: int) -> int:
        """How many of ``count`` items each process takes.

        Raises:
            ValueError: They cannot be shared equally.
        """
        if count % self.size:
            raise ValueError(f"A batch of {count} cannot be shared equally by {self.size} processes.")
        return count // self.size

    def sum(self, value: Tensor) -> Tensor:
        """The sum over all processes, on each of them; of integers it is exact."""
        if self.size > 1:
            value = value.clone()
            dist.all_reduce(value)
        return value

    def wait(self) -> None:
        """Until every process is here."""
        if self.size > 1:
            dist.barrier()

    def summed_gradient(self, loss: Tensor) -> Tensor:
        """The loss whose gradient, averaged over the processes by DistributedDataParallel, is the sum of theirs."""
        return loss if self.size == 1 else loss * self.size


ALONE = Group()


def is_launched() -> bool:
    """Whether this process was started by torchrun."""
    return {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= os.environ.keys()


def join(device: torch.device | str = "cpu") -> Group:
    """The group that torchrun started, joined for the life of this process; a group of one elsewhere.

    Args:
        device: On the CPU processes talk by gloo, on ``"cuda"`` by NCCL, one GPU each; any device of a single process.
    """
    device = torch.device(device)
    if not is_launched():
        return Group(device=device)
    rank, size, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if device.type == "cuda":
        if local >= torch.cuda.device_count():
            raise ValueError(
                f"Process {local} of this machine has no GPU: there are {torch.cuda.device_count()}. Start at most as "
                "many with --nproc-per-node, or run on the CPU."
            )
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=size, timeout=_PATIENCE)
    atexit.register(dist.destroy_process_group)
    return Group(rank, size, device)


def parallel(module: nn.Module, group: Group) -> nn.Module:
    """``module`` with its gradients averaged over the group; itself in a group of one."""
    if group.size == 1:
        return module
    return DistributedDataParallel(module, device_ids=[group.device.index] if group.device.type == "cuda" else None)
