"""What every attachment must satisfy. A new host inherits all of it by giving a model and an input.

Derive from :class:`AttachmentContract`, give ``cases``, and pytest does the rest on each of them.
"""

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

import nsr
from nsr.branches import find


@dataclass(frozen=True)
class Case:
    """One host to hold to the contract.

    Attributes:
        make: Builds the model.
        inputs: Builds its arguments.
        options: For :func:`nsr.attach`.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]
    options: dict[str, Any] = field(default_factory=dict)


class AttachmentContract:
    """Inherit, give ``cases``, and every test below runs on each of your hosts."""

    cases: dict[str, Case]

    @pytest.fixture
    def case(self, name: str) -> Case:
        torch.manual_seed(0)
        return self.cases[name]

    def test_attaching_changes_nothing(self, case: Case) -> None:
        model, inputs = case.make().eval(), case.inputs()
        plain, plain_training = outputs(model, inputs), outputs(copy.deepcopy(model).train(), inputs)
        before = {key: value.clone() for key, value in model.state_dict().items()}
        sites = nsr.attach(model, **case.options)
        assert same(outputs(model, inputs), plain)
        assert same(outputs(copy.deepcopy(model).train(), inputs), plain_training)  # host's dropout included
        after = model.state_dict()
        branches = tuple(f"{name}." for name in find(model))
        assert [key for key in after if not key.startswith(branches)] == list(before)
        assert all(torch.equal(after[key], value) for key, value in before.items())
        assert len(sites) == len(branches)
        assert sites.parameters == sum(p.numel() for branch in find(model).values() for p in branch.parameters())

    def test_a_trained_branch_acts_and_can_be_switched_off(self, case: Case) -> None:
        model, inputs = case.make().eval(), case.inputs()
        plain = outputs(model, inputs)
        nsr.attach(model, **case.options)
        train_branches(model)
        assert not same(outputs(model, inputs), plain)
        with nsr.disabled(model):
            assert same(outputs(model, inputs), plain)
        for branch in find(model).values():  # the output forced to zero is the plain model too
            nn.init.zeros_(branch.output[2].weight)
            nn.init.zeros_(branch.output[2].bias)
        assert same(outputs(model, inputs), plain)

    def test_detaching_restores_the_model(self, case: Case) -> None:
        model, inputs = case.make().eval(), case.inputs()
        plain = outputs(model, inputs)
        before = [(name, type(module), set(vars(module))) for name, module in model.named_modules()]
        keys = list(model.state_dict())
        nsr.attach(model, **case.options)
        train_branches(model)
        outputs(model, inputs)
        nsr.detach(model)
        assert [(name, type(module), set(vars(module))) for name, module in model.named_modules()] == before
        assert list(model.state_dict()) == keys
        assert same(outputs(model, inputs), plain)

    def test_copies_are_whole_and_independent(self, case: Case) -> None:
        model, inputs = case.make().eval(), case.inputs()
        nsr.attach(model, **case.options)
        train_branches(model)
        trained = outputs(model, inputs)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert same(outputs(twin, inputs), trained)
            assert len(nsr.sites(twin)) == len(nsr.sites(model))
            nsr.detach(twin)
            assert same(outputs(model, inputs), trained)

    def test_state_dicts_and_checkpoints_travel(self, case: Case, tmp_path: Path) -> None:
        model, inputs = case.make().eval(), case.inputs()
        plain_state = copy.deepcopy(model.state_dict())
        nsr.attach(model, **case.options)
        train_branches(model)
        nsr.save(model, tmp_path / "branch.safetensors")
        with safe_open(tmp_path / "branch.safetensors", framework="pt") as file:
            assert set(file.keys()) == model.state_dict().keys() - plain_state.keys()
        for travel in ("state", "checkpoint"):
            twin = case.make().eval()
            twin.load_state_dict(plain_state)
            nsr.attach(twin, **case.options)
            assert not same(outputs(twin, inputs), outputs(model, inputs))
            if travel == "state":
                twin.load_state_dict(model.state_dict())
            else:
                nsr.load(twin, tmp_path / "branch.safetensors")
            assert same(outputs(twin, inputs), outputs(model, inputs))

    def test_every_parameter_of_a_branch_learns(self, case: Case) -> None:
        model, inputs = case.make().train(), case.inputs()
        nsr.attach(model, **{**case.options, "init": "paper"})
        sum(value.square().sum() for value in outputs(model, inputs, grad=True)).backward()
        idle = [
            f"{name}.{key}"
            for name, branch in find(model).items()
            for key, parameter in branch.named_parameters()
            if parameter.grad is None or not parameter.grad.isfinite().all() or not parameter.grad.any()
        ]
        assert not idle

    def test_a_second_attach_is_refused(self, case: Case) -> None:
        model = case.make()
        nsr.attach(model, **case.options)
        with pytest.raises(ValueError, match=r"nsr\.detach"):
            nsr.attach(model, **case.options)


def outputs(model: nn.Module, inputs: tuple[Any, ...], grad: bool = False) -> list[Tensor]:
    """What the model returns, as a flat list of tensors; random numbers as at the first call."""
    torch.manual_seed(7)
    with torch.set_grad_enabled(grad):
        result = model(*inputs)
    if isinstance(result, dict):
        result = tuple(result.values())
    return list(result) if isinstance(result, tuple) else [result]


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    """Equal to the bit."""
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def train_branches(model: nn.Module) -> None:
    """Stand in for training: every parameter of every branch gets a value of its own."""
    generator = torch.Generator().manual_seed(3)
    for branch in find(model).values():
        for parameter in branch.parameters():
            parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
