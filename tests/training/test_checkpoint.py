"""Checkpoints survive: written whole, the last two kept, damage noticed, requests to stop answered."""

import os
import signal
from pathlib import Path

import pytest
import torch

from nsr.training import checkpoint, interruption
from nsr.training.checkpoint import Keeper

CONFIGURATION = {"experiment": "tree", "depth": 2}


def state(value: float) -> dict[str, torch.Tensor]:
    return {
        "weight": torch.full((3, 4), value),
        "half": torch.full((5,), value, dtype=torch.bfloat16),
        "count": torch.tensor(int(value)),
        "transposed": torch.arange(6.0).view(2, 3).T + value,
        "mask": torch.tensor([True, False]),
        "nothing": torch.zeros(0, 2),
    }


def test_round_trip_of_every_kind_of_tensor(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "run.safetensors"
    checkpoint.save(path, state(1), CONFIGURATION, 7)
    found = checkpoint.load(path, CONFIGURATION)
    assert found is not None
    assert found[1] == 7
    for name, tensor in state(1).items():
        assert torch.equal(found[0][name], tensor)
        assert found[0][name].dtype == tensor.dtype
    assert [file.name for file in path.parent.iterdir()] == ["run.safetensors"]


def test_the_last_two_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    for epoch in (1, 2, 3):
        checkpoint.save(path, state(epoch), CONFIGURATION, epoch)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["run.safetensors", "run.safetensors.previous"]
    assert checkpoint.load(path, CONFIGURATION)[1] == 3  # type: ignore[index]
    path.unlink()  # killed between the two renames
    assert checkpoint.load(path, CONFIGURATION)[1] == 2  # type: ignore[index]
    checkpoint.remove(path)
    assert not list(tmp_path.iterdir())
    assert checkpoint.load(path, CONFIGURATION) is None


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("damage", ["truncated", "empty", "tensor", "checksum", "header"])
def test_a_damaged_one_falls_back_with_a_warning(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "run.safetensors"
    for epoch in (1, 2):
        checkpoint.save(path, state(epoch), CONFIGURATION, epoch)
    data = path.read_bytes()
    if damage == "truncated":
        path.write_bytes(data[:-3])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "tensor":
        flip(path, len(data) - 1)
    elif damage == "checksum":
        flip(path, data.index(b"checksum") + 12)
    else:
        flip(path, 3)
    with pytest.warns(UserWarning, match="damaged .* goes on from the checkpoint before it"):
        found = checkpoint.load(path, CONFIGURATION)
    assert found is not None
    assert found[1] == 1
    flip(path.with_name("run.safetensors.previous"), -1)
    with pytest.raises(ValueError, match=r"damaged .* Delete .*run\.safetensors to start this run anew"):
        checkpoint.load(path, CONFIGURATION)


def test_another_run_is_not_resumed(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "run", state(1), CONFIGURATION, 1)
    assert checkpoint.load(tmp_path / "run", CONFIGURATION | {"depth": 3}) is None


def test_a_failed_write_leaves_the_last_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run"
    for epoch in (1, 2):
        checkpoint.save(path, state(epoch), CONFIGURATION, epoch)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def full(tensors: object, target: Path, metadata: object) -> None:
        target.write_bytes(b"half of i")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(ValueError, match=r"No space left on device.*free some room"):
        checkpoint.save(path, state(3), CONFIGURATION, 3)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_keeper_writes_when_it_is_time(tmp_path: Path) -> None:
    asked: list[int] = []

    def now() -> dict[str, torch.Tensor]:
        asked.append(1)
        return state(1)

    Keeper(tmp_path / "run", CONFIGURATION, every=3600).keep(now, 1)
    assert not asked
    keeper = Keeper(tmp_path / "run", CONFIGURATION, every=0)
    assert keeper.resume() is None
    keeper.keep(now, 5)
    assert keeper.resume()[1] == 5  # type: ignore[index]
    keeper.finish()
    assert not list(tmp_path.iterdir())
    nowhere = Keeper(None, CONFIGURATION, every=0)
    nowhere.keep(now, 1)
    nowhere.finish()
    assert nowhere.resume() is None
    assert len(asked) == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_request_to_stop_writes_a_checkpoint_and_leaves(tmp_path: Path, number: signal.Signals, code: int) -> None:
    before = signal.getsignal(number)
    keeper = Keeper(tmp_path / "run", CONFIGURATION, every=3600)
    with interruption.noticed():
        interruption.leave_if_requested()
        os.kill(os.getpid(), number)
        assert interruption.requested()
        assert signal.getsignal(number) is before  # a second one ends the process
        keeper.keep(lambda: state(4), 4)
        with pytest.raises(SystemExit) as left:
            interruption.leave_if_requested()
    assert left.value.code == code
    assert not interruption.requested()
    assert signal.getsignal(number) is before
    assert keeper.resume()[1] == 4  # type: ignore[index]
