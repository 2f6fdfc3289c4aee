"""The data sets, each read from a small tree of its own layout; and what is said when a tree is broken."""

from pathlib import Path

import numpy as np
import pytest

from data.segmentation.trees import packed_voc, picture, save, voc_tree
from nsr.data.segmentation.ade20k import ade20k
from nsr.data.segmentation.cityscapes import EVALUATED, cityscapes
from nsr.data.segmentation.shapes import shapes
from nsr.data.segmentation.voc import voc

MASKS = {
    "2007_000001": np.array([[0, 20, 255], [3, 3, 0]], dtype=np.uint8).repeat(8, 0).repeat(8, 1),
    "2007_000002": np.full((10, 12), 7, dtype=np.uint8),
}


class TestVoc:
    def test_tree(self, tmp_path: Path) -> None:
        voc_tree(tmp_path, MASKS)
        split = voc(tmp_path, "train")
        assert len(split) == 2
        assert split.num_classes == 21
        for index, mask in enumerate(MASKS.values()):
            image, labels = split[index]
            assert image.shape == (*mask.shape, 3)
            assert split.size(index) == mask.shape
            np.testing.assert_array_equal(labels, mask)

    def test_packed_copy_holds_the_same(self, tmp_path: Path) -> None:
        packed_voc(tmp_path, MASKS, "val")
        split = voc(tmp_path, "val")
        for index, mask in enumerate(MASKS.values()):
            image, labels = split[index]
            np.testing.assert_array_equal(image, picture(mask.shape, index))  # lossless here
            np.testing.assert_array_equal(labels, mask)
            assert split.size(index) == mask.shape

    def test_absent(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"neither at .*VOCdevkit.* nor at .*train\.npz.*VOCtrainval"):
            voc(tmp_path, "train")

    def test_id_out_of_range(self, tmp_path: Path) -> None:
        voc_tree(tmp_path, {"bad": np.full((4, 4), 21, dtype=np.uint8)})
        with pytest.raises(ValueError, match=r"bad\.png holds the id 21"):
            voc(tmp_path, "train")[0]

    def test_sizes_differ(self, tmp_path: Path) -> None:
        tree = voc_tree(tmp_path, MASKS)
        save(tree / "JPEGImages" / "2007_000002.jpg", picture((10, 13)))
        with pytest.raises(ValueError, match=r"2007_000002\.jpg has 13 × 10 pixels, its mask .* 12 × 10"):
            voc(tmp_path, "train")[1]

    def test_missing_mask(self, tmp_path: Path) -> None:
        tree = voc_tree(tmp_path, MASKS)
        (tree / "SegmentationClass" / "2007_000001.png").unlink()
        with pytest.raises(ValueError, match=r"2007_000001\.png is missing"):
            voc(tmp_path, "train")

    def test_truncated_image(self, tmp_path: Path) -> None:
        tree = voc_tree(tmp_path, {"cut": np.zeros((64, 64), dtype=np.uint8)})
        path = tree / "JPEGImages" / "cut.jpg"
        path.write_bytes(path.read_bytes()[:900])
        with pytest.raises(ValueError, match=r"cut\.jpg is damaged or truncated"):
            voc(tmp_path, "train")[0]

    def test_truncated_mask(self, tmp_path: Path) -> None:
        tree = voc_tree(tmp_path, {"cut": np.zeros((64, 64), dtype=np.uint8)})
        path = tree / "SegmentationClass" / "cut.png"
        path.write_bytes(path.read_bytes()[:-40])
        with pytest.raises(ValueError, match=r"cut\.png is damaged or truncated"):
            voc(tmp_path, "train")[0]

    def test_no_image_at_all(self, tmp_path: Path) -> None:
        tree = voc_tree(tmp_path, {"text": np.zeros((8, 8), dtype=np.uint8)})
        (tree / "JPEGImages" / "text.jpg").write_text("not an image")
        with pytest.raises(ValueError, match=r"text\.jpg is not a readable image"):
            voc(tmp_path, "train")[0]

    def test_coloured_mask(self, tmp_path: Path) -> None:
        tree = voc_tree(tmp_path, {"rgb": np.zeros((8, 8), dtype=np.uint8)})
        save(tree / "SegmentationClass" / "rgb.png", picture((8, 8)))
        with pytest.raises(ValueError, match=r"rgb\.png is a mask of mode RGB; expected one channel"):
            voc(tmp_path, "train")[0]

    def test_empty_split(self, tmp_path: Path) -> None:
        voc_tree(tmp_path, {})
        with pytest.raises(ValueError, match="voc2012 train is empty"):
            voc(tmp_path, "train")

    def test_damaged_packed_copy(self, tmp_path: Path) -> None:
        path = packed_voc(tmp_path, MASKS)
        path.write_bytes(path.read_bytes()[:200])
        with pytest.raises(ValueError, match=r"train\.npz is damaged.* not a packed copy"):
            voc(tmp_path, "train")

    def test_packed_copy_with_objects_is_refused(self, tmp_path: Path) -> None:
        path = packed_voc(tmp_path, MASKS)
        with np.load(path) as file:
            arrays = dict(file)
        np.savez(path, **{**arrays, "ids": np.array(["a", {"b": 1}], dtype=object)})
        with pytest.raises(ValueError, match="not a packed copy"):
            voc(tmp_path, "train")

    @pytest.mark.data
    def test_the_real_thing(self, data_dir: Path) -> None:
        if not (data_dir / "voc2012" / "train.npz").is_file():
            pytest.skip("the packed VOC 2012 is not in NSR_DATA")
        assert [len(voc(data_dir, split)) for split in ("train", "val")] == [1464, 1449]
        image, labels = voc(data_dir, "train")[0]
        assert image.shape == (256, image.shape[1], 3)
        assert set(np.unique(labels)) <= {*range(21), 255}


class TestAde20k:
    @staticmethod
    def tree(folder: Path, mask: np.ndarray, part: str = "training") -> None:
        tree = folder / "ADEChallengeData2016"
        save(tree / "images" / part / "ADE_train_00000001.jpg", picture(mask.shape))
        save(tree / "annotations" / part / "ADE_train_00000001.png", mask)

    def test_ids_become_labels(self, tmp_path: Path) -> None:
        self.tree(tmp_path, np.array([[0, 1, 150]], dtype=np.uint8).repeat(3, 0))
        _, labels = ade20k(tmp_path, "train")[0]
        assert labels[0].tolist() == [255, 0, 149]

    def test_id_out_of_range(self, tmp_path: Path) -> None:
        self.tree(tmp_path, np.full((3, 3), 151, dtype=np.uint8), "validation")
        with pytest.raises(ValueError, match="holds the id 151"):
            ade20k(tmp_path, "val")[0]

    def test_missing_mask(self, tmp_path: Path) -> None:
        self.tree(tmp_path, np.zeros((3, 3), dtype=np.uint8))
        save(tmp_path / "ADEChallengeData2016" / "images" / "training" / "extra.jpg", picture((3, 3)))
        with pytest.raises(ValueError, match=r"extra\.png is missing"):
            ade20k(tmp_path, "train")

    def test_absent_and_empty(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"There is no ADE20K at .*ADEChallengeData2016\.zip"):
            ade20k(tmp_path, "train")
        (tmp_path / "ADEChallengeData2016" / "images" / "training").mkdir(parents=True)
        with pytest.raises(ValueError, match="ade20k train is empty"):
            ade20k(tmp_path, "train")


class TestCityscapes:
    @staticmethod
    def tree(folder: Path, mask: np.ndarray) -> None:
        tree = folder / "cityscapes"
        save(tree / "leftImg8bit" / "train" / "ulm" / "ulm_000001_000019_leftImg8bit.png", picture(mask.shape))
        save(tree / "gtFine" / "train" / "ulm" / "ulm_000001_000019_gtFine_labelIds.png", mask)

    def test_label_ids_become_train_ids(self, tmp_path: Path) -> None:
        ids = np.array([*range(34), 255], dtype=np.uint8)
        self.tree(tmp_path, ids[None].repeat(2, 0))
        _, labels = cityscapes(tmp_path, "train")[0]
        kept = {int(raw): int(label) for raw, label in zip(ids, labels[0], strict=True) if label != 255}
        assert kept == {raw: label for label, raw in enumerate(EVALUATED)}
        assert kept[7] == 0  # road
        assert kept[33] == 18  # bicycle

    def test_id_out_of_range(self, tmp_path: Path) -> None:
        self.tree(tmp_path, np.full((2, 2), 34, dtype=np.uint8))
        with pytest.raises(ValueError, match=r"labelIds\.png holds the id 34"):
            cityscapes(tmp_path, "train")[0]

    def test_absent(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"There is no Cityscapes .*register.*gtFine_trainvaltest\.zip"):
            cityscapes(tmp_path, "val")


class TestShapes:
    def test_every_class_occurs_and_items_depend_on_seed_split_and_index_alone(self) -> None:
        split = shapes("train", 20)
        seen = {int(value) for index in range(20) for value in np.unique(split[index][1])}
        assert seen == {0, 1, 2, 3, 4, 255}
        np.testing.assert_array_equal(split[3][0], shapes("train", 4)[3][0])
        assert split[3][0].shape != shapes("val", 4)[3][0].shape or (split[3][0] != shapes("val", 4)[3][0]).any()
        assert split.items[3].image != shapes("train", 4, seed=1).items[3].image
