"""The explanation's numbers, its pictures and its page."""

import json
import re

import pytest
import torch
from PIL import Image

from nsr.tokens import MPM, MergedViT, Segmenter, TokenResidual, ToMe, load_segmenter, save_segmenter
from nsr.tokens.explain import explain
from nsr.tokens.explain_page import write_page
from nsr.tokens.explain_picture import (
    class_map,
    heat_map,
    highest_energy,
    merge_map,
    named_predictions,
    palette,
    spread,
    write_figure,
)
from nsr.tokens.image import load_image, normalise
from tokens.vits import images, make, train_a_little


@pytest.fixture(scope="module")
def picture():
    return torch.rand(3, 64, 96, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def explanation(picture):
    return explain(MergedViT(make(), ToMe(r=4)), normalise(picture))


def test_counts_follow_the_merges(explanation):
    assert [view.tokens for view in explanation.blocks] == [20, 16, 12, 8]
    for view in explanation.blocks:
        covered = torch.bincount(view.token_of_patch.flatten())[1:]
        assert view.token_of_patch.shape == (4, 6)
        assert view.merged_share == pytest.approx(((covered > 1).sum() / (covered > 0).sum()).item())
        assert 0 < view.lost_share < 1


def test_residual_is_nonzero_exactly_where_this_block_merged(explanation):
    before = torch.arange(24).view(4, 6)
    for view in explanation.blocks:
        new_group = view.token_of_patch
        for row, column in torch.cartesian_prod(torch.arange(4), torch.arange(6)).tolist():
            mates = before[new_group == new_group[row, column]].unique()
            assert (view.residual[row, column] > 0) == (len(mates) > 1)
        before = new_group


def test_blocks_that_merge_nothing_forget_nothing(picture):
    explanation = explain(MergedViT(make(), MPM((1,))), normalise(picture))
    assert [view.lost_share > 0 for view in explanation.blocks] == [False, True, False, False]
    assert [view.block for view in explanation.merges] == [1]
    assert explanation.blocks[0].tokens == 24
    assert torch.equal(explanation.total_residual, explanation.blocks[1].residual)


def test_predictions_with_and_without_the_branch(picture):
    vit = MergedViT(make(), ToMe(r=4), TokenResidual())
    segmenter = Segmenter(vit, 6)
    train_a_little(segmenter)
    segmenter.train()
    image = normalise(picture)
    seen = explain(segmenter, image)
    assert segmenter.training
    segmenter.eval()
    assert torch.equal(seen.prediction, segmenter(image[None]).argmax(dim=1)[0])
    assert (seen.prediction != seen.prediction_without).any()
    assert list(named_predictions(seen)) == ["without NSR", "with NSR"]
    plain = explain(Segmenter(MergedViT(make(), ToMe(r=4)), 6), image)
    assert list(named_predictions(plain)) == ["prediction"]


def test_merge_map_shows_groups_by_mean_colour_and_singletons_sharp(picture, explanation):
    view = explanation.blocks[-1]
    shown = merge_map(picture, view)
    assert shown.shape == (3, 128, 192)
    counts = torch.bincount(view.token_of_patch.flatten())
    for token in view.token_of_patch.unique().tolist():
        patches = (view.token_of_patch == token).nonzero()
        row, column = patches[0].tolist()
        inside = shown[:, 32 * row + 8 : 32 * row + 24, 32 * column + 8 : 32 * column + 24]
        if counts[token] == 1:
            assert inside.flatten(1).std(dim=1).min() > 0.05
        else:
            pixels = torch.cat(
                [picture[:, 16 * r : 16 * r + 16, 16 * c : 16 * c + 16].flatten(1) for r, c in patches], 1
            )
            torch.testing.assert_close(inside.flatten(1).mean(dim=1), pixels.mean(dim=1), rtol=0, atol=1e-5)


def test_heat_map_glows_where_something_was_lost(picture, explanation):
    view = explanation.blocks[0]
    shown = heat_map(picture, view.residual, highest_energy(explanation), zoom=1)
    grey = picture.mean(dim=0) * 0.6
    changed = (shown - grey).abs().amax(dim=0) > 1e-6
    lost = view.residual.repeat_interleave(16, 0).repeat_interleave(16, 1) > 0
    assert torch.equal(changed, lost)


def test_class_map_leaves_the_background_clear_and_uses_vocs_colours(picture):
    assert palette(22)[:4] == [(0, 0, 0), (128, 0, 0), (0, 128, 0), (128, 128, 0)]
    assert palette(22)[15] == (192, 128, 128)  # person
    prediction = torch.zeros(64, 96, dtype=torch.long)
    prediction[:32] = 2
    shown = class_map(picture, prediction, zoom=1)
    torch.testing.assert_close(shown[:, 32:], 0.7 * picture[:, 32:])
    torch.testing.assert_close(shown[1, :32], 0.35 * picture[1, :32] + 0.65 * 128 / 255)


def test_six_blocks_are_spread_from_first_to_last():
    views = list(range(12))
    assert spread(views, 6) == [0, 2, 4, 7, 9, 11]
    assert spread(views[:3], 6) == [0, 1, 2]


def test_figure_and_page_are_written(tmp_path, picture, explanation):
    write_figure(tmp_path / "e.png", picture, explanation, "a title")
    with Image.open(tmp_path / "e.png") as figure:
        assert figure.width > 1000
    write_page(tmp_path / "e.html", picture, explanation, "<a title>")
    page = (tmp_path / "e.html").read_text()
    assert "&lt;a title&gt;" in page
    assert "{{" not in page
    assert not re.search(r"(src|href)=\"?https?:", page)  # nothing is fetched
    data = json.loads(re.search(r"const data = (\{.*\});", page).group(1))
    assert [block["tokens"] for block in data["blocks"]] == [20, 16, 12, 8]
    assert all(block["map"].startswith("data:image/webp;base64,") for block in data["blocks"])


def test_a_picture_is_fitted_and_normalised(tmp_path):
    Image.new("RGB", (300, 100), (255, 0, 0)).save(tmp_path / "red.png")
    picture = load_image(tmp_path / "red.png", (64, 96))
    assert picture.shape == (3, 64, 96)
    torch.testing.assert_close(picture.mean(dim=(1, 2)), torch.tensor([1.0, 0.0, 0.0]))
    torch.testing.assert_close(normalise(picture)[:, 0, 0], torch.tensor([2.2489, -2.0357, -1.8044]), rtol=0, atol=1e-3)
    (tmp_path / "no.png").write_text("not a picture")
    for name, message in (("no.png", "not a picture"), ("absent.png", "no picture at")):
        with pytest.raises(ValueError, match=message):
            load_image(tmp_path / name, (64, 96))


@pytest.mark.parametrize("rule", [ToMe(r=4), MPM((0, 2)), None], ids=str)
def test_a_segmenter_file_rebuilds_the_segmenter(tmp_path, rule):
    segmenter = Segmenter(MergedViT(make(), rule, TokenResidual(code=16) if rule else None), 6).eval()
    train_a_little(segmenter)
    save_segmenter(segmenter, tmp_path / "s.safetensors")
    # the backbone given has another size and a classifier; the file decides
    rebuilt = load_segmenter(tmp_path / "s.safetensors", make("vit", num_classes=9)).eval()
    image = images(segmenter.vit.backbone)
    assert torch.equal(rebuilt(image), segmenter(image))
    assert rebuilt.vit.merger == rule


def test_files_that_are_no_segmenter_are_refused(tmp_path):
    save_segmenter(Segmenter(MergedViT(make(depth=3), ToMe(r=4)), 6), tmp_path / "other.safetensors")
    (tmp_path / "broken.safetensors").write_bytes(b"x")
    for name, message in (
        ("other.safetensors", "another backbone"),
        ("broken.safetensors", "not a readable"),
        ("absent.safetensors", "no segmenter at"),
    ):
        with pytest.raises(ValueError, match=message):
            load_segmenter(tmp_path / name, make())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: explain(MergedViT(make(), None), torch.zeros(3, 64, 96)), "merges nothing"),
        (lambda: explain(MergedViT(make(), ToMe(r=1)), torch.zeros(2, 3, 64, 96)), "One image at a time"),
    ],
)
def test_bad_input_says_what_to_change(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_every_module_has_its_mode_again_whatever_happens(picture):
    segmenter = Segmenter(MergedViT(make(), ToMe(r=4)), 3).train()
    segmenter.vit.backbone.eval()
    explain(segmenter, normalise(picture))
    with pytest.raises(ValueError, match="The images are"):
        explain(segmenter, torch.randn(3, 32, 32))
    assert segmenter.training
    assert not segmenter.vit.backbone.training


def test_pixels_are_normalised_as_a_model_has_it():
    half = normalise(torch.ones(3, 1, 1), mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    assert torch.equal(half.flatten(), torch.ones(3))
