"""The options that name a merger and its settings, shared by the commands that take one."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from nsr.tokens import MergeRule

Merger = Annotated[str, typer.Option(help="tome, pitome or mpm.")]
R = Annotated[int | None, typer.Option("--r", help="ToMe: tokens merged a block.")]
Keep = Annotated[float | None, typer.Option(help="PiToMe: share of tokens kept a block, such as 0.895.")]
Blocks = Annotated[str | None, typer.Option(help="MPM: blocks that merge, counted from 0, such as 0,4,5,9.")]
Grid = Annotated[str, typer.Option(help="Patches as HEIGHTxWIDTH; 14x14 is a 224 × 224 image with patch 16.")]

_SETTING = {"tome": "r", "pitome": "keep", "mpm": "blocks"}


def parse_merger(merger: str, r: int | None, keep: float | None, blocks: str | None) -> "MergeRule":
    """The rule that the options name."""
    from nsr.tokens import MPM, PiToMe, ToMe

    given = {"r": r, "keep": keep, "blocks": blocks}
    require_merger(merger)
    for name, value in given.items():
        if (name == _SETTING[merger]) != (value is not None):
            remedy = f"--{_SETTING[merger]} is what it needs" if value is None else f"it takes no --{name}"
            raise ValueError(f"Wrong settings for --merger {merger}: {remedy}.")
    if r is not None:
        return ToMe(r)
    if keep is not None:
        return PiToMe(keep)
    assert blocks is not None
    return MPM(tuple(integers("--blocks", blocks)))


def require_merger(merger: str) -> None:
    """Refuse a merger that the commands do not know."""
    if merger not in _SETTING:
        raise ValueError(f"Unknown merger {merger!r}; --merger is one of {', '.join(_SETTING)}.")


def parse_grid(text: str) -> tuple[int, int]:
    """``"14x14"`` to ``(14, 14)``."""
    height, _, width = text.lower().partition("x")
    if not (height.isdecimal() and width.isdecimal()):
        raise ValueError(f"--grid {text!r} is not HEIGHTxWIDTH in patches, such as 14x14.")
    return int(height), int(width)


def integers(option: str, text: str) -> list[int]:
    """``"0,4,5"`` to ``[0, 4, 5]``."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} {text!r} is not a list of whole numbers, such as 0,4,5,9.") from None
