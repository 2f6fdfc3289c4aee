"""Kernels of a step, by name."""

from types import SimpleNamespace

from torch.autograd import DeviceType

from nsr.bench.kernel_times import MOST, by_name


def event(name: str, microseconds: float, device: DeviceType = DeviceType.CUDA) -> SimpleNamespace:
    return SimpleNamespace(name=name, device_time=microseconds, device_type=device)


def test_added_up_and_the_longest_first() -> None:
    events = [event("sum", 2.0), event("product", 3.0), event("sum", 4.0), event("launch", 9.0, DeviceType.CPU)]
    assert list(by_name(events).items()) == [
        ("sum", {"launches": 2, "microseconds": 6.0}),
        ("product", {"launches": 1, "microseconds": 3.0}),
    ]


def test_only_the_longest_are_kept() -> None:
    kept = by_name(event(str(number), number) for number in range(MOST + 5))
    assert list(kept) == [str(number) for number in range(MOST + 4, 4, -1)]
