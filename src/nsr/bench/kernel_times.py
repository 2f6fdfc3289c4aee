"""Where the time of a step goes on a GPU: its kernels by name."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

Kernels = dict[str, dict[str, float]]  # launches and microseconds by name

MOST = 25  # names that are kept, those with the most time


def kernel_times(step: Callable[[], object], device: torch.device) -> Kernels:
    """Launches and microseconds of each kernel of one call, the longest first; a CPU has none."""
    if device.type != "cuda":
        return {}
    step()
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize(device)
    return by_name(profiler.events() or ())


def by_name(events: Iterable[Any]) -> Kernels:
    """Events of a profiler that ran on a GPU, added up by their name."""
    found: Kernels = {}
    for event in events:
        if event.device_type == DeviceType.CUDA:
            entry = found.setdefault(event.name, {"launches": 0, "microseconds": 0.0})
            entry["launches"] += 1
            entry["microseconds"] += event.device_time
    longest = sorted(found.items(), key=lambda item: -item[1]["microseconds"])
    return dict(longest[:MOST])
