"""``nsr explain --gallery``: chosen validation images through trained models, side by side on one page."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from nsr.data.segmentation.split import Split
    from nsr.experiments.segmentation import SegmentationLab
    from nsr.report.gallery import Exhibit
    from nsr.tokens import Segmenter
    from nsr.tokens.explain import BlockView

REMARK = (
    "What merging does to dense prediction, and what the null-space residual gives back. The merge map shows each "
    "group of patches in its mean colour; the last picture shows how much of each patch the merges made invisible."
)

VOC_CLASSES = [
    "background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "table", "dog",
    "horse", "motorbike", "person", "plant", "sheep", "sofa", "train", "monitor",
]  # fmt: skip


def open_gallery(
    task: str, merger: str, point: str, seed: int, ids: str, outputs: Path, data: Path | None, path: Path
) -> None:
    """Write the gallery of the images that ``ids`` names by commas, with the models that ``nsr run`` trained."""
    import torch

    from nsr.data.folder import data_folder
    from nsr.experiments.segmentation import SegmentationLab
    from nsr.experiments.segmentation_task import TASKS

    if task not in TASKS:
        raise ValueError(f"Unknown task {task!r}; expected {', '.join(TASKS)}.")
    names = [name for name in ids.split(",") if name]
    if not names:
        raise ValueError("--gallery names no image; give ids of validation images, such as 2007_000033,2007_000042.")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lab = SegmentationLab(TASKS[task], data or data_folder(), outputs, device)
    make_gallery(lab, merger, point, seed, names, path)


def make_gallery(lab: "SegmentationLab", merger: str, point: str, seed: int, ids: Sequence[str], path: Path) -> None:
    """Write the gallery of some validation images.

    Args:
        lab: Has the data and the weights that ``nsr run`` kept of the full, the merged and the NSR model.
        merger: Which merger.
        point: At which operating point.
        seed: Of which seed.
        ids: Images of the validation split.
        path: The page.
    """
    from nsr.experiments.segmentation_cells import SegmentationCell
    from nsr.experiments.segmentation_task import FULL_POINT
    from nsr.report.gallery import write_gallery
    from nsr.report.names import name
    from nsr.tokens.explain_picture import palette

    models = {
        "full": lab.trained(SegmentationCell("none", FULL_POINT, "original", seed)),
        "merged": lab.trained(SegmentationCell(merger, point, "original", seed)),
        "merged + NSR": lab.trained(SegmentationCell(merger, point, "nsr", seed)),
    }
    split = lab.task.read(lab.folder, "val")
    exhibits, seen = [], set()
    for image in ids:
        exhibit, classes = _exhibit(lab, split, find(split, image), image, models)
        exhibits.append(exhibit)
        seen |= classes
    colours = palette(lab.task.shape.classes)
    titles = VOC_CLASSES if lab.task.name == "voc" else [f"class {index}" for index in range(len(colours))]
    legend = {titles[index]: "rgb({}, {}, {})".format(*colours[index]) for index in sorted(seen)}
    write_gallery(
        exhibits, path, f"{name(lab.task.name)}: {name(merger)} at {name(point)}, seed {seed}", REMARK, legend
    )


def find(split: "Split", name: str) -> int:
    """The position of an image by its id: a word of its name, or the stem of its file."""
    for index, item in enumerate(split.items):
        if name in item.image_name.split() or name == Path(item.image_name).stem:
            return index
    raise ValueError(f"{split.name} has no image {name!r}; an id is such as {Path(split.items[0].image_name).stem!r}.")


def _exhibit(
    lab: "SegmentationLab", split: "Split", index: int, name: str, models: "dict[str, Segmenter]"
) -> "tuple[Exhibit, set[int]]":
    import numpy as np
    import torch

    from nsr.data.segmentation.batch import DEVIATION, MEAN
    from nsr.data.segmentation.crops import centre_crops
    from nsr.data.segmentation.split import IGNORE
    from nsr.data.segmentation.workers import crop_sample
    from nsr.report.gallery import Exhibit, Panel
    from nsr.tokens.explain import explain
    from nsr.tokens.explain_picture import class_map, heat_map, merge_map

    pixels, labels = split[index]
    crop = centre_crops(np.array([pixels.shape[:2]]), lab.task.window)[0]
    batch = crop_sample(pixels, labels, crop, lab.task.window)
    shown = batch.image[0] * torch.tensor(DEVIATION).view(3, 1, 1) + torch.tensor(MEAN).view(3, 1, 1)
    truth, judged = batch.labels[0], batch.labels[0] != IGNORE
    panels = [
        Panel("image", _bytes(shown)),
        Panel("truth", _bytes(class_map(shown, truth.where(judged, 0), zoom=1))),
    ]
    seen = set(truth[judged].tolist())
    for title, model in models.items():
        with torch.inference_mode():
            prediction = model.eval()(batch.image.to(lab.device)).argmax(1)[0].cpu()
        right = float((prediction == truth)[judged].float().mean())
        panels.append(Panel(title, _bytes(class_map(shown, prediction, zoom=1)), f"{right:.1%} of the pixels right"))
        seen |= set(prediction.unique().tolist())
    explanation = explain(models["merged + NSR"], batch.image[0].to(lab.device))
    view, lost = telling_view(explanation.blocks), explanation.total_residual.cpu()
    tokens = f"{view.token_of_patch.numel()} patches, {view.tokens} tokens after block {view.block}"
    panels.append(Panel("merge map", _bytes(merge_map(shown, view)), tokens))
    panels.append(Panel("residual energy", _bytes(heat_map(shown, lost, float(lost.max()) or 1.0)), "all blocks"))
    return Exhibit(name, panels), seen


def telling_view(blocks: "Sequence[BlockView]") -> "BlockView":
    """The last block that leaves a quarter of the patches apart: later ones can be a single colour."""
    return next((view for view in reversed(blocks) if 4 * view.tokens >= view.token_of_patch.numel()), blocks[0])


def _bytes(pixels: "Tensor") -> "np.ndarray":
    return (pixels.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).contiguous().numpy()
