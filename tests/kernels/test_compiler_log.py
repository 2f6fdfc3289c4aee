"""The message that torch's compiler writes about an operator, and that must not describe all that led to it."""

import pytest
import torch
from torch._inductor import exc
from torch._subclasses.fake_tensor import FakeTensorMode

from nsr.kernels.tokens import GroupLayout, unmerge
from nsr.kernels.tokens.compiler_log import shorten


@pytest.fixture(autouse=True)
def own_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test puts in its place goes with the test."""
    monkeypatch.setattr(exc.OperatorIssue, "operator_str", staticmethod(exc.OperatorIssue.operator_str))


class Described:
    """An argument that knows whether it has been written out."""

    written = False

    def __str__(self) -> str:
        self.written = True
        return "all that it is computed from"


@pytest.mark.parametrize(("version", "described"), [("2.11.0", False), ("2.15.0", True)])
def test_arguments_are_not_described(monkeypatch: pytest.MonkeyPatch, version: str, described: bool) -> None:
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
    shorten()
    argument = Described()
    message = exc.OperatorIssue.operator_str("nsr.unmerge", (argument,), {})
    assert "nsr.unmerge" in message
    assert argument.written == described


def test_an_operator_that_is_traced_shortens_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.11.0"))
    with FakeTensorMode():
        group = torch.zeros(1, 4, dtype=torch.int32)
        layout = GroupLayout(*[group] * len(GroupLayout._fields))
        unmerge(torch.zeros(1, 3, 8), [layout], num_prefix=1)
    argument = Described()
    exc.OperatorIssue.operator_str("nsr.unmerge", (argument,), {})
    assert not argument.written
