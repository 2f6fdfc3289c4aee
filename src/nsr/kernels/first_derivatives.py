"""Operators that are gradients have none of their own: what they say when somebody asks."""

from typing import Any

from torch.library import CustomOpDef


def first_alone(*gradients: CustomOpDef) -> None:
    """Let operators that compute gradients say what a second derivative through them runs into."""
    for gradient in gradients:
        gradient.register_autograd(_refuse)


def _refuse(*_: Any) -> None:
    raise RuntimeError(
        "A null-space branch has first derivatives alone: a loss on gradients that go through it (forces, a gradient "
        "penalty) cannot be differentiated. Leave create_graph=True out, or take such gradients within "
        "nsr.disabled(model)."
    )
