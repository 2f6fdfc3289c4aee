"""An explanation as one HTML file that needs nothing else: a slider over the blocks."""

import base64
import html
import io
import json
from importlib import resources
from pathlib import Path

from torch import Tensor

from nsr.tokens.explain import Explanation
from nsr.tokens.explain_picture import class_map, heat_map, highest_energy, merge_map, named_predictions


def write_page(path: Path, image: Tensor, explanation: Explanation, title: str) -> None:
    """Write the page; every picture is inside it."""
    highest = highest_energy(explanation)
    data = {
        "picture": _data_uri(image),
        "patches": explanation.blocks[0].token_of_patch.numel(),
        "highest": highest,
        "blocks": [
            {
                "map": _data_uri(merge_map(image, view)),
                "heat": _data_uri(heat_map(image, view.residual, highest)),
                "tokens": view.tokens,
                "merged": view.merged_share,
                "lost": view.lost_share,
            }
            for view in explanation.blocks
        ],
        "predictions": [
            {"name": name, "picture": _data_uri(class_map(image, prediction))}
            for name, prediction in named_predictions(explanation).items()
        ],
    }
    template = resources.files("nsr.tokens").joinpath("explain.html").read_text(encoding="utf-8")
    # "</" inside a script would end it
    page = template.replace("{{title}}", html.escape(title)).replace("{{data}}", json.dumps(data).replace("</", "<\\/"))
    path.write_text(page, encoding="utf-8")


def _data_uri(pixels: Tensor) -> str:
    from PIL import Image

    bytes_ = (pixels.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).contiguous().numpy()
    buffer = io.BytesIO()
    Image.fromarray(bytes_).save(buffer, format="WEBP", quality=90)
    return f"data:image/webp;base64,{base64.b64encode(buffer.getvalue()).decode()}"
