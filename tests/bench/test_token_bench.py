"""The token benchmarks run, compare what they say they compare, and write what the report reads."""

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from nsr.bench import token_models as models
from nsr.bench.interleaved import interleaved
from nsr.bench.side_by_side import Model, _build, _Host, _in_turn
from nsr.cli import app
from nsr.tokens import MergedViT

SIZE = (64, 64)


@pytest.mark.parametrize(("command", "rate"), [("tokens", "images_per_second"), ("train", "steps_per_second")])
def test_a_quick_run_writes_every_arm(command: str, rate: str, tmp_path: Path) -> None:
    arguments = ["bench", command, "--quick", "--device", "cpu", "--machine", "here", "--results", str(tmp_path)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    record = json.loads((tmp_path / "bench" / f"{command}-here.json").read_text())
    (arms,) = record["metrics"].values()
    assert {name.split(",")[0] for name in arms} >= {"full", "merged", "merged + NSR"}
    assert all(arm[rate] > 0 and arm["milliseconds"]["median"] > 0 for arm in arms.values())
    assert arms["full, eager"]["speed_up"] == 1


def test_the_limit_and_the_peer_follow_the_same_schedule() -> None:
    r, removed = models.schedule((224, 224))
    assert (r, removed) == (29, [29, 29, 29, 29, 29, 25, 13, 6, 3, 2, 1, 0])


def test_the_literal_form_computes_what_the_library_computes() -> None:
    torch.manual_seed(0)
    literal = models.LiteralToMe(SIZE).eval()
    ours = models.merged(SIZE).eval()
    ours.load_state_dict(literal.state_dict())
    assert isinstance(ours.vit, MergedViT)
    image = models.matched_inputs(2, SIZE, torch.device("cpu"), torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(literal.patch_logits(image), ours.patch_logits(image), rtol=1e-4, atol=1e-4)


def test_the_limit_is_the_same_model_on_either_layers() -> None:
    torch.manual_seed(0)
    theirs, ours = models.FreeDrop(SIZE).eval(), models.FreeDrop(SIZE, own_layers=True).eval()
    ours.load_state_dict(theirs.state_dict())
    image = models.matched_inputs(2, SIZE, torch.device("cpu"), torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(ours.patch_logits(image), theirs.patch_logits(image), rtol=1e-4, atol=1e-4)


def test_arms_take_turns() -> None:
    calls: list[str] = []
    arms = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    times = interleaved(arms, torch.device("cpu"), rounds=3, seconds=0.0)
    assert calls[-6:] == ["a", "b"] * 3
    assert all(0 <= t.low <= t.median <= t.high for t in times.values())


def counting(name: str, fail: bool) -> dict[str, Callable[[], object]]:
    """A model of one arm, as a process builds it."""
    if fail:
        raise RuntimeError(f"{name} cannot be built")
    return {name: partial(time.sleep, 0.001)}


def test_models_are_measured_in_processes_of_their_own() -> None:
    """One that cannot be built is left out and named; the others are measured all the same."""
    hosts = [_Host(Model(counting, (name, name == "b")), torch.device("cpu")) for name in "abc"]
    with pytest.warns(UserWarning, match="b, True could not be built"):
        _build(hosts, 2, 60)
    measured = _in_turn(hosts, 2, 0.0, profile=lambda name: name == "c")
    for host in hosts:
        host.close()
    assert measured.keys() == {"a", "c"}
    assert all(arm.timing.median >= 1 for arm in measured.values())
    assert measured["a"].kernels is None
    assert measured["c"].kernels == {}, "asked for, and a CPU has none"


def test_a_model_that_takes_too_long_is_given_up() -> None:
    hosts = [_Host(Model(time.sleep, (60 + k,)), torch.device("cpu")) for k in range(2)]  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match=r"was not built after 0\.1 s") as warned:
        _build(hosts, 1, 0.1)  # the second one is not even started
    assert len(warned) == 2
    assert _in_turn(hosts, 2, 0.0, profile=bool) == {}
    for host in hosts:
        host.close()
