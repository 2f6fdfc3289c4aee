"""``nsr flops``, ``nsr operating-point`` and ``nsr explain`` from the command line."""

import json

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from typer.testing import CliRunner

from nsr.cli import app
from nsr.tokens import MergedViT, Segmenter, TokenResidual, ToMe, save_segmenter
from tokens.vits import make


def nsr(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def json_of(*arguments):
    result = nsr(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def test_flops_of_tome_are_exact():
    assert json_of("flops", "--merger", "tome", "--r", 14, "--grid", "14x14", "--classes", 21) == {
        "full": 1_254_281_472,
        "base": 698_040_320,
        "nsr": 749_878_784,
        "nsr_executed": 719_669_264,
        "achieved": 1_254_281_472 / 698_040_320,
        "sites": 12,
        "params_full": 5_528_853,
        "params_nsr": 6_094_485,
    }


def test_flops_of_pitome_and_mpm():
    pitome = json_of("flops", "--merger", "pitome", "--keep", 0.895)
    assert (pitome["base"], pitome["nsr"]) == (698_337_792, 736_120_320)
    mpm = json_of("flops", "--merger", "mpm", "--blocks", "0,4,5,9", "--pairs", "40,30,20,10")
    assert mpm["sites"] == 4
    assert mpm["params_nsr"] == 5_725_589
    assert mpm["base"] < mpm["nsr_executed"] < mpm["nsr"] < mpm["full"]


def test_flops_of_another_vit():
    base = json_of(
        *("flops", "--merger", "tome", "--r", 16, "--dim", 768, "--depth", 12, "--heads", 12, "--grid", "24x24")
    )
    assert base["params_full"] == 85_798_656 + (577 - 197) * 768 + 2 * 768 + 21 * 769  # ViT-B/16 at 384, our head


def test_flops_as_a_table():
    result = nsr("flops", "--merger", "tome", "--r", 29)
    assert result.exit_code == 0
    assert "0.3725" in result.output
    assert "÷ 3.367" in result.output


def test_operating_points():
    assert json_of("operating-point", "--merger", "tome", "--target", 1.8, "--grid", "14x14", "--classes", 21) == {
        "control": 14,
        "achieved": 1_254_281_472 / 698_040_320,
        "base": 698_040_320,
    }
    point = json_of("operating-point", "--merger", "pitome", "--target", 3.4, "--grid", "32x64", "--classes", 19)
    assert point["control"] == 0.794
    assert "keep = 0.794" in nsr("operating-point", "--merger", "pitome", "--target", 3.4, "--grid", "32x64").output


@pytest.fixture
def pictures(tmp_path):
    folder = tmp_path / "pictures"
    folder.mkdir()
    for index in range(3):
        pixels = torch.randint(0, 255, (9, 11, 3), dtype=torch.uint8).numpy()
        Image.fromarray(pixels).resize((110, 90)).save(folder / f"{index}.png")
    return folder


def test_mpm_operating_point_is_searched_on_pictures(tmp_path, pictures):
    save_file(make("vit").state_dict(), tmp_path / "w.safetensors")
    shape = ("--grid", "4x4", "--dim", 48, "--depth", 4, "--heads", 3, "--classes", 5)
    point = json_of(
        *("operating-point", "--merger", "mpm", "--target", 1.4, *shape),
        *("--images", pictures, "--weights", tmp_path / "w.safetensors"),
    )
    assert point["achieved"] == pytest.approx(1.4, abs=0.15)
    assert all(0 <= block < 4 for block in point["control"])


@pytest.fixture
def backbone():
    return timm.create_model("deit_tiny_patch16_224", pretrained=False)


def test_explain_writes_a_picture_and_a_page(tmp_path, pictures, backbone):
    save_file(backbone.state_dict(), tmp_path / "w.safetensors")
    result = nsr(
        *("explain", pictures / "0.png", "--merger", "pitome", "--keep", 0.7, "--weights", tmp_path / "w.safetensors"),
        *("--size", "64x96", "--out", tmp_path / "out" / "seen"),
    )
    assert result.exit_code == 0, result.exception
    assert "24 patches become" in result.output
    with Image.open(tmp_path / "out" / "seen.png") as figure:
        assert figure.width > 1000
    assert "PiToMe, keep = 0.7" in (tmp_path / "out" / "seen.html").read_text()


def test_explain_without_a_merger_takes_tome(tmp_path, pictures, backbone):
    save_file(backbone.state_dict(), tmp_path / "w.safetensors")
    result = nsr("explain", pictures / "0.png", "--weights", tmp_path / "w.safetensors", "--out", tmp_path / "seen")
    assert result.exit_code == 0, result.exception
    assert "196 patches become 28 tokens" in result.output


def test_explain_a_segmenter(tmp_path, pictures, backbone):
    vit = MergedViT(backbone, ToMe(r=4), TokenResidual(), img_size=(64, 96))
    save_segmenter(Segmenter(vit, 6), tmp_path / "s.safetensors")
    result = nsr("explain", pictures / "1.png", "--segmenter", tmp_path / "s.safetensors", "--out", tmp_path / "seg")
    assert result.exit_code == 0, result.exception
    page = (tmp_path / "seg.html").read_text()
    assert '"name": "with NSR"' in page
    assert '"name": "without NSR"' in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("flops --merger todo --r 3", "Unknown merger 'todo'; --merger is one of tome, pitome, mpm"),
        ("flops --merger tome", "--r is what it needs"),
        ("flops --merger tome --r 3 --keep 0.9", "takes no --keep"),
        ("flops --merger tome --r 3 --pairs 4", "--pairs belongs to --merger mpm"),
        ("flops --merger pitome --keep 0.4", r"\[0.5, 1\), got 0.4"),
        ("flops --merger pitome --keep 1", r"\[0.5, 1\), got 1"),
        ("flops --merger mpm --blocks 3,12 --pairs 1,1", "block 12, but the ViT has 12 blocks"),
        ("flops --merger mpm --blocks 3,x --pairs 1,1", "not a list of whole numbers"),
        ("flops --merger mpm --blocks 3", "needs one pair count"),
        ("flops --merger tome --r 3 --grid 14", "not HEIGHTxWIDTH"),
        ("flops --merger tome --r 3 --dim 100", "not divisible by 3 heads"),
        ("operating-point --merger tome --target 0.9", "at least 1; got 0.9"),
        ("operating-point --merger todo --target 2", "Unknown merger"),
        ("operating-point --merger mpm --target 2", "needs --images and --weights"),
        ("operating-point --merger tome --target 2 --weights x", "are for mpm"),
        ("explain x.png --model resnet51", "timm has no model 'resnet51'"),
        ("explain x.png --segmenter s --merger tome", "leave out --merger"),
        ("explain x.png --segmenter s --r 3", "name it with --merger"),
        ("explain x.png --keep 0.9", "name it with --merger"),
        ("explain x.png --merger tome --r 3 --weights x --size 224", "not HEIGHTxWIDTH"),
        ("explain x.png --weights x", "There is no checkpoint at x"),
    ],
)
def test_mistakes_are_named(arguments, message):
    result = nsr(*arguments.split())
    assert isinstance(result.exception, ValueError), result.output
    with pytest.raises(ValueError, match=message):
        raise result.exception
