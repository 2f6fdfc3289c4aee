"""The sweep's engine on this machine: so many processes at a time, forked from one that has loaded the libraries."""

import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from multiprocessing.connection import wait

import torch

from nsr.experiments.sweep import Ended, Engine, Make, Task, is_loss
from nsr.training import interruption


def local_engine(workers: int, *, retries: int = 2, gpus: Sequence[str] = (), preload: Sequence[str] = ()) -> Engine:
    """Runs on this machine.

    Args:
        workers: Processes at a time.
        retries: How often a lost run is started again.
        gpus: GPUs that they share, dealt out in turn, as ``CUDA_VISIBLE_DEVICES`` names them; several workers a GPU
            are a fraction of one each. None: each sees what this process sees.
        preload: Modules loaded once, before the processes are forked, so that a run starts at once.
    """
    if workers < 1 or retries < 0:
        raise ValueError(f"workers={workers} must be at least 1 and retries={retries} at least 0.")

    def engine(tasks: Sequence[Task], make: Make) -> Iterator[Ended]:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", *preload])
        waiting = [(task, 1) for task in reversed(tasks)]
        free = list(reversed(range(workers)))
        running: dict[int, tuple[multiprocessing.process.BaseProcess, Task, int, int]] = {}  # by what ends with it
        with interruption.noticed():
            while waiting or running:
                while waiting and free and not interruption.requested():
                    (task, attempt), slot = waiting.pop(), free.pop()
                    gpu = gpus[slot % len(gpus)] if gpus else None
                    started = context.Process(target=_child, args=(make, task, gpu, workers), name=task.name)
                    started.start()
                    running[started.sentinel] = started, task, attempt, slot
                if interruption.requested():
                    _stop([process for process, *_ in running.values()])
                    interruption.leave_if_requested()
                wait(list(running), timeout=0.5)
                for sentinel in [sentinel for sentinel, (process, *_) in running.items() if not process.is_alive()]:
                    process, task, attempt, slot = running.pop(sentinel)
                    free.append(slot)
                    code = process.exitcode
                    assert code is not None, "the process has ended"
                    process.close()
                    if is_loss(code) and attempt <= retries:
                        waiting.append((task, attempt + 1))
                    else:
                        yield Ended(task, code, attempt)

    return engine


def _child(make: Make, task: Task, gpu: str | None, workers: int) -> None:
    os.setsid()  # Ctrl-C is for the sweep, which passes it on once
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))
    sys.exit(make(task))


def _stop(processes: Sequence[multiprocessing.process.BaseProcess]) -> None:
    """Let every run write its checkpoint and leave."""
    for process in processes:
        process.terminate()
    for process in processes:
        process.join()
