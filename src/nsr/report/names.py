"""How the keys of a result are written for people, in the paper's order."""

from typing import Any

MERGERS = {"none": "Full-ViT", "tome": "ToMe", "pitome": "PiToMe", "mpm": "MPM", "algm": "ALGM", "dtem": "DTEM"}
BACKBONES = {"gcn": "GCN", "gin": "GIN", "sage": "GraphSAGE"}
SEGMENTATION = {"voc": "VOC", "cityscapes": "Cityscapes", "ade20k": "ADE20K"}
HETEROPHILOUS = {
    "roman-empire": "Roman-empire",
    "amazon-ratings": "Amazon-ratings",
    "minesweeper": "Minesweeper",
    "tolokers": "Tolokers",
    "questions": "Questions",
}
# Data sets that the paper does not have and we run besides.
FURTHER_HETEROPHILOUS = {"actor": "Actor", "chameleon-filtered": "Chameleon (filtered)"}
ROC_AUC = {"minesweeper", "tolokers", "questions"}
VARIANTS = {
    "original": "Original",
    "nsr": "+ NSR",
    "matched": "Original, wider",
    "raw-source": "RawSource",
    "post-aggregation": "Post-aggregation",
    "post-merge": "Post-merge",
    "feature": "NSR-Feature",
    "spatial": "NSR-Spatial",
    "adapter": "Adapter",
}
_ALL: dict[str, str] = MERGERS | BACKBONES | SEGMENTATION | HETEROPHILOUS | FURTHER_HETEROPHILOUS | VARIANTS


def name(key: Any) -> str:
    """The name people read, or the key itself.

    >>> name("pitome"), name("3.4x"), name("new-merger")
    ('PiToMe', '3.4×', 'new-merger')
    """
    text = str(key)
    if text.endswith("x") and text[:-1].replace(".", "", 1).isdigit():
        return f"{text[:-1]}×"
    return _ALL.get(text.replace("_", "-"), text)
