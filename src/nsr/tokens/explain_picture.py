"""The pictures of an explanation: arrays of pixels, and one figure that holds them all."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from nsr.tokens.explain import BlockView, Explanation

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LINE = 0.92  # brightness of the lines between groups


def merge_map(image: Tensor, view: BlockView, zoom: int = 2) -> Tensor:
    """The picture as the merged tokens see it: every group in its mean colour, with a line around it.

    Args:
        image: Pixels in [0, 1], ``[3, H, W]``.
        view: A block.
        zoom: Output pixels for one of the picture's.

    Returns:
        ``[3, zoom·H, zoom·W]``.
    """
    group = _to_pixels(view.token_of_patch, image)
    flat, pixels = group.flatten(), image.flatten(1)
    count = torch.bincount(flat).clamp(min=1)
    total = pixels.new_zeros(3, len(count)).index_add(1, flat, pixels)
    mean = (total / count)[:, group]  # shape: [3, H, W]
    # a singleton keeps its pixels, so that what was not merged stays sharp
    patches = torch.bincount(view.token_of_patch.flatten(), minlength=len(count))
    shown = torch.where((patches > 1)[group], mean, image)
    shown, group = _enlarge(shown, zoom), _to_pixels(group, torch.empty(3, *(zoom * s for s in group.shape)))
    below, right = group[:-1] != group[1:], group[:, :-1] != group[:, 1:]
    edge = torch.zeros_like(group, dtype=torch.bool)
    edge[:-1] |= below
    edge[1:] |= below
    edge[:, :-1] |= right
    edge[:, 1:] |= right
    return torch.where(edge, LINE, shown)


def heat_map(image: Tensor, energy: Tensor, highest: float, zoom: int = 2) -> Tensor:
    """The picture in grey with energy ``[h, w]`` glowing on it: ``[3, zoom·H, zoom·W]``."""
    from matplotlib import colormaps

    heat = (_to_pixels(energy, image) / highest).clamp(0, 1)
    colour = torch.tensor(colormaps["inferno"](heat.numpy())[..., :3], dtype=image.dtype).permute(2, 0, 1)
    grey = image.mean(dim=0, keepdim=True).expand(3, -1, -1) * 0.6
    strength = heat.sqrt() * 0.85
    return _enlarge(grey * (1 - strength) + colour * strength, zoom)


def class_map(image: Tensor, prediction: Tensor, zoom: int = 2) -> Tensor:
    """Predicted classes ``[H, W]`` in colour over the picture; class 0 is left clear: ``[3, zoom·H, zoom·W]``."""
    colour = torch.tensor(palette(int(prediction.max()) + 1), dtype=image.dtype)[prediction].permute(2, 0, 1) / 255
    return _enlarge(torch.where(prediction > 0, 0.35 * image + 0.65 * colour, 0.7 * image), zoom)


def palette(classes: int) -> list[tuple[int, int, int]]:
    """Pascal VOC's colours, which go on for any number of classes: the bits of the index, highest first."""
    return [
        tuple(sum(((index >> (3 * bit + channel)) & 1) << (7 - bit) for bit in range(8)) for channel in range(3))  # type: ignore[misc]
        for index in range(classes)
    ]


def highest_energy(explanation: Explanation) -> float:
    """The top of the colour scale, one for all blocks: nearly the largest share that any patch lost."""
    lost = torch.cat([view.residual.flatten() for view in explanation.blocks])
    lost = lost[lost > 0]
    return float(lost.quantile(0.99)) if len(lost) else 1.0


def write_figure(path: Path, image: Tensor, explanation: Explanation, title: str) -> None:
    """One PNG: the picture, up to six blocks, what each forgot, the counts, and the predictions if there are any."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    chosen = spread(explanation.merges or explanation.blocks, 6)
    highest = highest_energy(explanation)
    ratio = image.shape[1] / image.shape[2]
    figure = plt.figure(figsize=(2.35 * (len(chosen) + 1) + 0.6, 2.35 * ratio * 2 + 3.9), dpi=130, layout="constrained")
    halves = figure.add_gridspec(2, 1, height_ratios=[2 * ratio, 1.15])
    cells = halves[0].subgridspec(2, len(chosen) + 2, width_ratios=[1.0] * (len(chosen) + 1) + [0.05])
    _show(figure.add_subplot(cells[0, 0]), image, "the picture")
    total = explanation.total_residual
    _show(figure.add_subplot(cells[1, 0]), heat_map(image, total, float(total.max()) or 1.0), "forgotten, all blocks")
    for column, view in enumerate(chosen, start=1):
        _show(
            figure.add_subplot(cells[0, column]),
            merge_map(image, view),
            f"after block {view.block}: {view.tokens} tokens",
        )
        caption = f"forgets {view.lost_share:.0%}" if view.lost_share else "no merge here"
        _show(figure.add_subplot(cells[1, column]), heat_map(image, view.residual, highest), caption)
    scale = plt.cm.ScalarMappable(plt.Normalize(0, 100 * highest), "inferno")
    bar = figure.colorbar(scale, cax=figure.add_subplot(cells[1, -1]))
    bar.set_label("% of a token forgotten, ‖z‖/‖x‖", fontsize=8)
    predictions = named_predictions(explanation)
    last = halves[1].subgridspec(1, 1 + len(predictions), width_ratios=[3.2] + [1] * len(predictions))
    _chart(figure.add_subplot(last[0]), explanation)
    for column, (name, prediction) in enumerate(predictions.items(), start=1):
        _show(figure.add_subplot(last[column]), class_map(image, prediction), name)
    figure.suptitle(title, fontsize=12, fontweight="bold")
    figure.savefig(path)
    plt.close(figure)


def named_predictions(explanation: Explanation) -> dict[str, Tensor]:
    """The predictions there are, by what to call them."""
    if explanation.prediction is None:
        return {}
    if explanation.prediction_without is None:
        return {"prediction": explanation.prediction}
    return {"without NSR": explanation.prediction_without, "with NSR": explanation.prediction}


def spread(views: Sequence[BlockView], most: int) -> list[BlockView]:
    """At most ``most`` of the views, first and last among them, evenly spread."""
    if len(views) <= most:
        return list(views)
    return [views[round(i * (len(views) - 1) / (most - 1))] for i in range(most)]


def _show(axes: "Axes", pixels: Tensor, caption: str) -> None:
    axes.imshow(pixels.permute(1, 2, 0).clamp(0, 1).numpy(), interpolation="antialiased")
    axes.set_title(caption, fontsize=9)
    axes.set_axis_off()


def _chart(axes: "Axes", explanation: Explanation) -> None:
    blocks, merges = explanation.blocks, explanation.merges
    index = [view.block for view in blocks]
    axes.bar(index, [view.tokens for view in blocks], color="#9db8d2", label="patch tokens left")
    merged = [view.tokens * view.merged_share for view in blocks]
    axes.bar(index, merged, color="#2f5d8a", label="of them, standing for several patches")
    axes.set_xlabel("after block")
    axes.set_ylabel("tokens")
    axes.set_xticks(index)
    axes.spines[["top", "right"]].set_visible(False)
    share = axes.twinx()
    lost = [100 * view.lost_share for view in merges]
    share.plot([view.block for view in merges], lost, color="#d1495b", marker="o", label="forgotten, ‖Z‖/‖X‖")
    share.set_ylabel("% forgotten", color="#d1495b")
    share.set_ylim(bottom=0)
    share.spines[["top", "left"]].set_visible(False)
    handles = [*axes.get_legend_handles_labels()[0], *share.get_legend_handles_labels()[0]]
    axes.legend(handles=handles, fontsize=8, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)


def _to_pixels(cells: Tensor, image: Tensor) -> Tensor:
    """A grid of cells at the picture's resolution: ``[h, w] -> [H, W]``."""
    rows = torch.arange(image.shape[1]) * cells.shape[0] // image.shape[1]
    columns = torch.arange(image.shape[2]) * cells.shape[1] // image.shape[2]
    return cells[rows][:, columns]


def _enlarge(image: Tensor, zoom: int) -> Tensor:
    return F.interpolate(image.unsqueeze(0), scale_factor=zoom, mode="nearest")[0]
