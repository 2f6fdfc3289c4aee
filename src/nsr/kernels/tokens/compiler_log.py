"""Spares torch's compiler a message that it would write for hours.

Before torch 2.15 Inductor describes for its log each operator that it meets for the first time with all that its
arguments are computed from, a shared one again for every way that leads to it. The groups of a merge event go into the
next event several times over, so the number of ways grows by a factor an event, and the operators at the end of a
merged ViT are the first to meet all of them. They call :func:`shorten` when they are traced, ahead of the compiler.
"""

import sys
from collections.abc import Mapping, Sequence

import torch


def shorten() -> None:
    """Let the compiler name an operator without describing its arguments, where it would do so unasked."""
    module = sys.modules.get("torch._inductor.exc")
    if module is not None and torch.torch_version.TorchVersion(torch.__version__) < "2.15":
        module.OperatorIssue.operator_str = staticmethod(_name)


def _name(target: object, args: Sequence[object], kwargs: Mapping[str, object]) -> str:
    return f"  target: {target}, with {len(args) + len(kwargs)} arguments"
