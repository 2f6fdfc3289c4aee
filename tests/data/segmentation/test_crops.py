"""Crops: the same for everybody who asks with the same numbers, and distributed as the paper says."""

import colorsys

import numpy as np
import pytest
import torch

from nsr.data.segmentation.batch import DEVIATION, MEAN
from nsr.data.segmentation.crops import (
    HEIGHT,
    IMAGE,
    LEFT,
    MIRRORED,
    TOP,
    WIDTH,
    centre_crops,
    epoch_colours,
    epoch_crops,
)
from nsr.data.segmentation.photometric import distort
from nsr.data.segmentation.resident import load_resident, resident_batch, resident_bytes
from nsr.data.segmentation.shapes import shapes
from nsr.data.segmentation.workers import crop_sample, worker_batches

WINDOW = (48, 64)


@pytest.fixture(scope="module")
def split():
    return shapes("train", 12)


@pytest.fixture(scope="module")
def resident(split):
    return load_resident(split)


class TestDraws:
    sizes = np.array([[100, 150], [80, 60], [256, 341]])

    def test_depend_on_seed_and_epoch_alone(self) -> None:
        first = epoch_crops(self.sizes, (64, 64), seed=1, epoch=2)
        np.random.seed(5)
        torch.manual_seed(9)
        assert torch.equal(first, epoch_crops(self.sizes, (64, 64), seed=1, epoch=2))
        assert not torch.equal(first, epoch_crops(self.sizes, (64, 64), seed=1, epoch=3))
        assert not torch.equal(first, epoch_crops(self.sizes, (64, 64), seed=2, epoch=2))

    def test_distribution(self) -> None:
        sizes = np.tile([[200, 400]], (20_000, 1))
        crops = epoch_crops(sizes, (224, 224), seed=0, epoch=0).numpy()
        assert sorted(crops[:, IMAGE]) == list(range(20_000))
        factor = crops[:, HEIGHT] / 200
        assert factor.min() >= 0.5
        assert factor.max() <= 2.0
        assert np.quantile(factor, [0.25, 0.5, 0.75]) == pytest.approx([0.875, 1.25, 1.625], abs=0.02)
        assert np.abs(crops[:, WIDTH] - 2 * crops[:, HEIGHT]).max() <= 1  # the aspect ratio is kept
        assert crops[:, MIRRORED].mean() == pytest.approx(0.5, abs=0.02)
        free = np.maximum(crops[:, [HEIGHT, WIDTH]] - 224, 0)
        start = crops[:, [TOP, LEFT]]
        assert (start >= 0).all()
        assert (start <= free).all()
        room = free[:, 1] > 50
        assert (start[room, 1] / free[room, 1]).mean() == pytest.approx(0.5, abs=0.02)
        assert (start[room, 1] == free[room, 1]).any()

    def test_scales_can_start_from_a_given_shorter_side(self) -> None:
        stored = np.tile([[200, 400], [300, 150]], (10, 1))
        full = 2 * stored
        crops = [epoch_crops(sizes, (64, 64), seed=3, epoch=1, shorter_side=64) for sizes in (stored, full)]
        assert torch.equal(*crops)  # whatever the resolution they are stored at
        shorter = crops[0][:, [HEIGHT, WIDTH]].amin(1)
        assert shorter.min() >= 32
        assert shorter.max() <= 128

    def test_centre(self) -> None:
        crops = centre_crops(np.array([[256, 341], [500, 375], [224, 224]]), (224, 224))
        assert crops.tolist() == [[0, 224, 298, 0, 37, 0], [1, 299, 224, 37, 0, 0], [2, 224, 224, 0, 0, 0]]

    def test_colours(self) -> None:
        colours = epoch_colours(20_000, seed=0, epoch=0)
        neutral = torch.tensor([0.0, 1.0, 1.0, 0.0])
        assert (colours[:, :4] == neutral).float().mean(0).tolist() == pytest.approx([0.5] * 4, abs=0.02)
        assert colours.amin(0).tolist() == pytest.approx([-32, 0.5, 0.5, -36, 0], abs=0.1)
        assert colours.amax(0).tolist() == pytest.approx([32, 1.5, 1.5, 36, 1], abs=0.1)


class TestPixels:
    @pytest.mark.parametrize("photometric", [False, True])
    def test_resident_equals_the_plain_way(self, split, resident, photometric: bool) -> None:
        for epoch in range(3):
            crops = epoch_crops(resident.sizes, WINDOW, seed=0, epoch=epoch)
            colours = epoch_colours(len(crops), seed=0, epoch=epoch) if photometric else None
            fast = resident_batch(resident, crops, WINDOW, colours)
            for row, crop in enumerate(crops):
                plain = crop_sample(*split[int(crop[0])], crop, WINDOW, None if colours is None else colours[row])
                torch.testing.assert_close(fast.image[row], plain.image[0], rtol=0, atol=1e-4)
                assert torch.equal(fast.labels[row], plain.labels[0])

    def test_an_untouched_image_comes_back(self, split, resident) -> None:
        height, width = resident.sizes[4].tolist()
        batch = resident_batch(resident, torch.tensor([[4, height, width, 0, 0, 0]]), (height, width))
        image, labels = split[4]
        pixels = batch.image[0] * torch.tensor(DEVIATION).view(3, 1, 1) + torch.tensor(MEAN).view(3, 1, 1)
        np.testing.assert_array_equal((pixels * 255).round().permute(1, 2, 0).numpy(), image)
        np.testing.assert_array_equal(batch.labels[0].numpy(), labels)

    def test_mirror_and_padding(self, resident) -> None:
        plain = resident_batch(resident, torch.tensor([[0, 20, 30, 0, 0, 0]]), WINDOW)
        mirrored = resident_batch(resident, torch.tensor([[0, 20, 30, 0, 0, 1]]), WINDOW)
        assert torch.equal(plain.image.flip(-1), mirrored.image)
        assert torch.equal(plain.labels.flip(-1), mirrored.labels)
        assert (plain.image[..., 20:, :] == 0).all()
        assert (plain.labels[..., :, 30:] == 255).all()

    def test_workers_give_the_same_batches(self, split, resident) -> None:
        crops = epoch_crops(resident.sizes, WINDOW, seed=3, epoch=0)
        batches = list(worker_batches(split, crops, WINDOW, 5, workers=1))
        assert len(batches) == 2
        for batch, rows in zip(batches, crops.split(5), strict=False):
            same = resident_batch(resident, rows, WINDOW)
            torch.testing.assert_close(batch.image, same.image, rtol=0, atol=1e-4)
            assert torch.equal(batch.labels, same.labels)

    def test_memory_is_foretold(self, resident) -> None:
        assert resident_bytes(resident.sizes) == resident.words.numel() * resident.words.element_size()


class TestPhotometric:
    rgb = torch.randint(0, 256, (2, 3, 5, 5), generator=torch.Generator().manual_seed(0)).float()

    def test_neutral(self) -> None:
        neutral = torch.tensor([[0.0, 1, 1, 0, 0], [0, 1, 1, 0, 1]])
        torch.testing.assert_close(distort(self.rgb, neutral), self.rgb, rtol=0, atol=1e-3)

    def test_saturation_and_hue_are_those_of_hsv(self) -> None:
        out = distort(self.rgb, torch.tensor([[0.0, 1, 0.6, 30, 0]] * 2))
        for pixel, changed in zip(self.rgb[0].flatten(1).T, out[0].flatten(1).T, strict=True):
            hue, saturation, value = colorsys.rgb_to_hsv(*(pixel / 255).tolist())
            expected = colorsys.hsv_to_rgb((hue + 30 / 360) % 1, saturation * 0.6, value)
            assert (changed / 255).tolist() == pytest.approx(expected, abs=1e-4)

    def test_contrast_first_or_last(self) -> None:
        grey = torch.full((2, 3, 1, 1), 100.0)
        out = distort(grey, torch.tensor([[20.0, 1.5, 1, 0, 0], [20.0, 1.5, 1, 0, 1]]))
        torch.testing.assert_close(out, torch.full_like(grey, 180.0))
