"""The segmentation experiments end to end on generated shapes: cells, results, resuming, numerics, adapter, points."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from nsr.data.segmentation.shapes import shapes
from nsr.data.segmentation.split import Split
from nsr.experiments import segmentation as experiment
from nsr.experiments import segmentation_runs as runs
from nsr.experiments.merge_survey import cost, image_events, merged_share
from nsr.experiments.segmentation import SegmentationLab
from nsr.experiments.segmentation_cells import ABLATIONS, SegmentationCell, select_cells
from nsr.experiments.segmentation_model import VARIANTS, make_segmenter, shared_weights
from nsr.experiments.segmentation_points import with_found_schedules
from nsr.experiments.segmentation_runs import run_numerics, run_points, run_table
from nsr.experiments.segmentation_task import MERGERS, TASKS
from nsr.tokens.budget import ViTShape

NOWHERE = Path("nowhere")
SHAPES = TASKS["shapes"]
TINY = replace(
    SHAPES,
    name="tiny",
    shape=ViTShape((4, 4), 5, dim=16, depth=3, heads=2, patch=8),
    read=lambda _, part: shapes(part, {"train": 9, "val": 5}[part]),
    mpm={"1.8x": (0, 2)},
    mpm_targets={"1.8x": 1.3},
    protocol=replace(SHAPES.protocol, epochs=2, batch=4, precision="fp32"),
)


@pytest.fixture
def lab(tmp_path: Path) -> SegmentationLab:
    return SegmentationLab(TINY, NOWHERE, tmp_path / "outputs", torch.device("cpu"))


def result(folder: Path, experiment: str, name: str) -> dict:
    return json.loads((folder / experiment / f"{name}.json").read_text())


class TestOperatingPoints:
    @pytest.mark.parametrize(
        ("task", "tome", "pitome"),
        [
            ("voc", [14, 21, 29, 33], [0.895, 0.829, 0.754, 0.725]),
            ("ade20k", [66, 98, 140, 161], [0.908, 0.849, 0.781, 0.752]),
            ("cityscapes", [124, 187, 266, 304], [0.913, 0.859, 0.794, 0.767]),
        ],
    )
    def test_settings_are_the_papers(self, task: str, tome: list[int], pitome: list[float]) -> None:
        at = TASKS[task]
        assert [at.rule("tome", point).r for point in at.points("tome")] == tome
        assert [at.rule("pitome", point).keep for point in at.points("pitome")] == pitome
        assert set(at.mpm) == set(at.mpm_targets)

    def test_costs_are_the_papers(self) -> None:
        at = TASKS["voc"]
        events = image_events(at.shape, at.rule("tome", "3.4x"), {})
        found = {name: cost(at.shape, events, residual) for name, residual in VARIANTS.items()}
        assert round(found["original"]["gflops_paper"], 3) == 0.373
        assert [round(found[name]["gflops_paper"], 3) for name in ("nsr", "raw-source", "adapter")] == [0.407] * 3
        in_between = [found[name]["gflops_paper"] for name in ("original", "post-merge", "feature", "spatial", "nsr")]
        assert in_between == sorted(in_between)
        assert found["original"]["achieved"] == pytest.approx(3.367, abs=5e-4)
        share = merged_share(at.shape, image_events(at.shape, at.rule("tome", "1.8x"), {}))
        assert share == pytest.approx([14 / 196] * 12)

    def test_unknown(self) -> None:
        with pytest.raises(ValueError, match=r"mpm has no point '3\.4x' on voc; it has 1\.8x, 2\.4x, 3\.0x, 3\.3x"):
            TASKS["voc"].rule("mpm", "3.4x")
        with pytest.raises(ValueError, match="Unknown merger 'tomy'"):
            TASKS["voc"].points("tomy")


class TestCells:
    def test_the_whole_column(self) -> None:
        cells = select_cells(TASKS["voc"])
        assert len(cells) == 25
        assert cells[0] == SegmentationCell("none", "1.0x", "original", 0)
        assert len(select_cells(TASKS["voc"], MERGERS, variants=ABLATIONS, seeds=[0, 1])) == 96

    def test_selectors(self) -> None:
        names = [cell.name for cell in select_cells(TASKS["voc"], ["tome", "mpm"], ["1.8x", "3.4x"], ["nsr"], [2])]
        assert names == ["tome-1.8x-nsr-2", "tome-3.4x-nsr-2", "mpm-1.8x-nsr-2"]

    @pytest.mark.parametrize(
        ("selectors", "message"),
        [
            ({"mergers": ["tomy"]}, "Unknown merger 'tomy'"),
            ({"variants": ["full"]}, "Unknown variant 'full'; expected original, nsr"),
            ({"points": ["9x"]}, "voc has no point '9x'"),
            ({"mergers": ["mpm"], "points": ["3.4x"]}, "Nothing is selected on voc"),
            ({"mergers": ["none"], "variants": ["nsr"]}, "Nothing is selected on voc"),
        ],
    )
    def test_nonsense(self, selectors: dict, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            select_cells(TASKS["voc"], **selectors)


class TestModels:
    def test_compared_models_start_from_the_same_weights(self) -> None:
        shared = shared_weights(TINY, 3, NOWHERE)
        image = torch.randn(2, 3, 32, 32)
        outputs = {}
        for variant in VARIANTS:
            model = make_segmenter(TINY, TINY.rule("tome", "3.4x"), variant, shared, 3, NOWHERE).eval()
            assert all(torch.equal(model.state_dict()[name], value) for name, value in shared.items())
            outputs[variant] = model(image)
        assert all(torch.equal(out, outputs["original"]) for out in outputs.values())
        assert not torch.equal(shared["head.weight"], shared_weights(TINY, 4, NOWHERE)["head.weight"])

    def test_the_random_stream_is_left_alone(self) -> None:
        torch.manual_seed(1)
        expected = torch.rand(1)
        torch.manual_seed(1)
        make_segmenter(TINY, None, "original", shared_weights(TINY, 0, NOWHERE), 0, NOWHERE)
        assert torch.equal(torch.rand(1), expected)

    def test_an_adapter_trains_branch_and_head_alone(self) -> None:
        shared = shared_weights(TINY, 0, NOWHERE)
        model = make_segmenter(TINY, TINY.rule("tome", "3.4x"), "adapter", shared, 0, NOWHERE)
        learning = {name.split(".")[1] if name.startswith("vit") else name.split(".")[0]
                    for name, parameter in model.named_parameters() if parameter.requires_grad}  # fmt: skip
        assert learning == {"branches", "spatial", "norm", "head"}

    def test_without_weights(self) -> None:
        with pytest.raises(ValueError, match=r"DeiT-Tiny's weights are not at nowhere.*deit_tiny_patch16_224\.fb_in1k"):
            shared_weights(TASKS["voc"], 0, NOWHERE)

    @pytest.mark.data
    def test_parameters_on_voc_are_the_papers(self, data_dir: Path) -> None:
        if not (data_dir / "deit_tiny").is_dir():
            pytest.skip("DeiT-Tiny's weights are not in NSR_DATA")
        task = TASKS["voc"]
        shared = shared_weights(task, 0, data_dir)
        sizes = {}
        for variant in ("original", "nsr"):
            model = make_segmenter(task, task.rule("tome", "3.4x"), variant, shared, 0, data_dir)
            sizes[variant] = sum(parameter.numel() for parameter in model.parameters())
        assert sizes == {"original": 5_528_853, "nsr": 6_048_373}


class TestRuns:
    def test_curves_are_drawn_only_where_asked_for(self, lab: SegmentationLab, tmp_path: Path) -> None:
        cells = select_cells(TINY, ["tome"], ["1.8x"])
        results, folder = tmp_path / "results", tmp_path / "curves"
        run_table(lab, cells, TINY.protocol, results, say=lambda _: None)
        assert list(tmp_path.rglob("*tfevents*")) == []
        run_table(
            lab, cells, TINY.protocol, results, together=2, force=True, say=lambda _: None, every=0, tensorboard=folder
        )
        for cell in cells:
            losses = EventAccumulator(str(folder / "tiny" / cell.name)).Reload().Scalars("loss")
            assert [loss.step for loss in losses] == list(range(1, TINY.protocol.epochs + 1))
            assert losses[-1].value == pytest.approx(result(results, "tiny", cell.name)["metrics"]["loss"])

    def test_weights_of_another_folders_result_are_spoken_of(self, lab: SegmentationLab, tmp_path: Path) -> None:
        (cell,) = select_cells(TINY, ["tome"], ["1.8x"], ["original"])
        for folder, expected in (("results", False), ("trial", True)):
            lines: list[str] = []
            run_table(lab, [cell], TINY.protocol, tmp_path / folder, say=lines.append)
            assert any("has the weights of a run whose result is not in" in line for line in lines) is expected

    def test_results_are_written_once(self, lab: SegmentationLab, tmp_path: Path) -> None:
        cells = select_cells(TINY, ["none", "tome", "mpm"], ["1.0x", "1.8x"])
        lines: list[str] = []
        run_table(lab, cells, TINY.protocol, tmp_path, together=3, with_numerics=True, say=lines.append)
        written = sorted(path.name for path in (tmp_path / "tiny").glob("*.json"))
        assert len(written) == 5
        found = result(tmp_path, "tiny", "mpm-1.8x-nsr-0")
        assert found["schema"] == 1
        assert found["status"] == "done"
        assert found["cell"] == {"merger": "mpm", "point": "1.8x", "variant": "nsr", "seed": 0}
        assert found["command"] == "nsr run tiny --merger mpm --point 1.8x --variant nsr --seed 0"
        assert {"miou", "pixel_accuracy", "gflops_paper", "gflops_executed", "params", "achieved"} <= set(
            found["metrics"]
        )
        assert 0 < found["metrics"]["miou"] <= 1
        assert found["metrics"]["achieved"] > 1
        assert found["environment"]["trained_together"] == 2
        full = result(tmp_path, "tiny", "none-1.0x-original-0")["metrics"]
        assert full["achieved"] == 1
        assert full["params"] < found["metrics"]["params"]

        numbers = result(tmp_path, "numerics", "tiny-mpm-1.8x-0")["metrics"]
        assert numbers["null_violation"] < 2e-6
        assert numbers["blocks"] == [0, 2]
        assert 0 < numbers["residual_share"] < 1

        before = {path: path.read_text() for path in (tmp_path / "tiny").glob("*.json")}
        lines.clear()
        run_table(lab, cells, TINY.protocol, tmp_path, say=lines.append)
        assert all(line.endswith("there already") for line in lines)
        assert all(path.read_text() == text for path, text in before.items())
        run_table(lab, cells[:1], TINY.protocol, tmp_path, force=True, say=lines.append)
        assert "mIoU" in lines[-1]

    def test_another_configuration_is_another_run(self, lab: SegmentationLab, tmp_path: Path) -> None:
        cell = [SegmentationCell("none", "1.0x", "original")]
        run_table(lab, cell, TINY.protocol, tmp_path, say=lambda _: None)
        lines: list[str] = []
        run_table(lab, cell, replace(TINY.protocol, epochs=1), tmp_path, say=lines.append)
        assert "none-1.0x-original-0.json has a result of another configuration" in lines[0]
        assert "training for 1 epochs" in lines[1]
        assert result(tmp_path, "tiny", "none-1.0x-original-0")["command"].endswith("--seed 0 --epochs 1")

    def test_killed_and_resumed(self, lab: SegmentationLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        cell, protocol = SegmentationCell("tome", "1.8x", "nsr"), replace(TINY.protocol, epochs=3)
        (whole,) = lab.run([cell], protocol)
        monkeypatch.setattr(experiment, "_SECONDS_BETWEEN_CHECKPOINTS", 0.0)
        killed = SegmentationLab(TINY, NOWHERE, tmp_path / "again", torch.device("cpu"))

        def die(progress: object) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            list(killed.run([cell], protocol, watch=die, every=0))
        unfinished = tmp_path / "again" / "tiny" / f"{cell.name}.unfinished.safetensors"
        assert unfinished.is_file()
        epochs: list[int] = []
        (resumed,) = killed.run([cell], protocol, watch=lambda progress: epochs.append(progress.epoch), every=0)
        assert epochs == [2, 3]
        assert not unfinished.is_file()
        assert resumed.metrics == whole.metrics
        weights = whole.model.state_dict()
        assert all(torch.equal(weights[name], value) for name, value in resumed.model.state_dict().items())

    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo looks at it
    def test_compiled_branches_train_alike(self, lab: SegmentationLab, tmp_path: Path) -> None:
        cells = select_cells(TINY, ["tome", "mpm"], ["1.8x"], ["nsr"])
        compiled = SegmentationLab(TINY, NOWHERE, tmp_path / "c", torch.device("cpu"), compile_branches=True)
        for plain, fast in zip(lab.run(cells, TINY.protocol), compiled.run(cells, TINY.protocol), strict=True):
            assert fast.metrics["loss"] == pytest.approx(plain.metrics["loss"], rel=1e-3)
            assert fast.model.state_dict().keys() == plain.model.state_dict().keys()

    def test_trained_weights_come_back(self, lab: SegmentationLab) -> None:
        cell = SegmentationCell("mpm", "1.8x", "nsr")
        (outcome,) = lab.run([cell], TINY.protocol)
        image = torch.randn(1, 3, 32, 32)
        assert torch.equal(lab.trained(cell).eval()(image), outcome.model.eval()(image))
        with pytest.raises(
            ValueError, match=r"Train them first: nsr run tiny --merger tome --point 1\.8x --variant nsr"
        ):
            lab.trained(SegmentationCell("tome", "1.8x", "nsr"))

    def test_divergence_is_an_error_that_spares_the_others(
        self, lab: SegmentationLab, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        shared = lab.shared(1)
        monkeypatch.setattr(lab, "shared", lambda seed: {**shared, "head.bias": shared["head.bias"] / (1 - seed)})
        outcomes = lab.run([SegmentationCell("none", "1.0x", "original", seed) for seed in (1, 0)], TINY.protocol)
        assert next(outcomes).cell.seed == 0
        with pytest.raises(ValueError, match=r"tiny none-1\.0x-original-1: the loss diverged"):
            next(outcomes)

    def test_adapter(self, lab: SegmentationLab, tmp_path: Path) -> None:
        cell = [SegmentationCell("tome", "1.8x", "adapter")]
        with pytest.raises(ValueError, match=r"nsr run tiny --merger none --point 1\.0x --variant original --seed 0"):
            run_table(lab, cell, TINY.protocol, tmp_path, say=lambda _: None)
        (full,) = lab.run([SegmentationCell("none", "1.0x", "original")], TINY.protocol)
        run_table(lab, cell, TINY.protocol, tmp_path, say=lambda _: None)
        metrics = result(tmp_path, "tiny", "tome-1.8x-adapter-0")["metrics"]
        assert 0 < metrics["miou_untrained"] <= 1
        adapted = lab.trained(cell[0]).state_dict()
        kept = [name for name in full.model.state_dict() if name.startswith("vit.backbone")]
        assert all(torch.equal(adapted[name], full.model.state_dict()[name]) for name in kept)

    def test_numerics_from_kept_weights(self, lab: SegmentationLab, tmp_path: Path) -> None:
        cell = SegmentationCell("tome", "3.4x", "nsr")
        list(lab.run([cell], TINY.protocol))
        lines: list[str] = []
        for _ in range(2):
            run_numerics(lab, [cell], tmp_path, say=lines.append)
        assert "null violation" in lines[0]
        assert lines[1].endswith("there already")

    def test_operating_points(self, lab: SegmentationLab, tmp_path: Path) -> None:
        run_points(lab, MERGERS, ["1.8x"], tmp_path, say=lambda _: None)
        tome = result(tmp_path, "operating-points", "tiny-tome-1.8x")
        assert tome["cell"] == {"dataset": "tiny", "merger": "tome", "point": "1.8x"}
        assert len(tome["metrics"]["merged_share"]) == 3
        assert tome["metrics"]["r"] == TINY.rule("tome", "1.8x").r
        mpm = result(tmp_path, "operating-points", "tiny-mpm-1.8x")["metrics"]
        assert mpm["blocks"] == [0, 2]
        assert mpm["search"] > 1
        assert abs(mpm["search_found"] - 1.3) <= abs(mpm["search"] - 1.3)

        found = with_found_schedules(TINY, tmp_path)
        assert found.points("mpm") == ("1.8x-search",)
        assert list(found.rule("mpm", "1.8x-search").blocks) == mpm["blocks_found"]
        with pytest.raises(ValueError, match="Search first: nsr run operating-points --task tiny --merger mpm"):
            with_found_schedules(TINY, tmp_path / "elsewhere")


@pytest.mark.gpu
def test_killed_and_resumed_on_a_gpu_in_deterministic_mode(tmp_path: Path) -> None:
    """In a process of its own, because cuBLAS reads its setting when it starts."""
    script = """
import sys
from pathlib import Path
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from dataclasses import replace
from nsr.experiments import segmentation as experiment
from nsr.experiments import segmentation_runs as runs
from nsr.experiments.segmentation_cells import SegmentationCell
from nsr.experiments.segmentation_task import TASKS

torch.use_deterministic_algorithms(True)
experiment._SECONDS_BETWEEN_CHECKPOINTS = 0.0
task, folder = TASKS["shapes"], Path(sys.argv[1])
cell, protocol = SegmentationCell("tome", "1.8x", "nsr"), replace(task.protocol, epochs=3)
labs = [experiment.SegmentationLab(task, folder, folder / name, torch.device("cuda")) for name in ("whole", "killed")]
(whole,) = labs[0].run([cell], protocol)
try:
    list(labs[1].run([cell], protocol, watch=lambda progress: 1 / 0, every=0))
except ZeroDivisionError:
    pass
(resumed,) = labs[1].run([cell], protocol)
weights = whole.model.state_dict()
assert all(torch.equal(weights[name], value) for name, value in resumed.model.state_dict().items())
"""
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_stacks_are_not_torn_apart() -> None:
    def groups(sizes: list[int], together: int | None) -> list[list[int]]:
        cells = [[SegmentationCell("tome", "1.8x", "nsr", 10 * n + i) for i in range(k)] for n, k in enumerate(sizes)]
        return [[cell.seed for cell in group] for group in runs._groups(cells, together)]

    assert groups([1, 2, 2, 1], 3) == [[0, 10, 11], [20, 21, 30]]
    assert groups([2, 2, 2], 5) == [[0, 1, 10, 11], [20, 21]]
    assert groups([5], 2) == [[0, 1], [2, 3], [4]]
    assert groups([1, 1, 1], 1) == [[0], [10], [20]]
    assert groups([], 4) == []
    assert groups([2, 1], None) == [[0, 1], [10]]


@pytest.mark.data
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("merger", "point"), [("tome", "3.4x"), ("pitome", "3.4x"), ("mpm", "3.3x")])
def test_a_stack_on_real_images_computes_what_its_models_do(
    data_dir: Path, tmp_path: Path, merger: str, point: str, device: str
) -> None:
    """In fp32: half precision changes who merges with whom, in a model alone no less than in a stack."""
    if not (data_dir / "deit_tiny").is_dir() or not (data_dir / "voc2012").is_dir():
        pytest.skip("DeiT-Tiny's weights or VOC are not in NSR_DATA")

    def few(folder: Path, part: str) -> Split:
        whole = TASKS["voc"].read(folder, part)
        return Split(whole.name, whole.num_classes, whole.items[:4])

    task = replace(TASKS["voc"], read=few)
    lab = SegmentationLab(task, data_dir, tmp_path, torch.device(device))
    cells = [SegmentationCell(merger, point, variant) for variant in ("original", "nsr")]
    trainer = lab.trainer(cells, replace(task.protocol, batch=4, precision="fp32"))
    for model in trainer.models:  # decoders at zero would hide the branches
        for name, parameter in model.named_parameters():
            if "decoder" in name:
                torch.nn.init.normal_(parameter, std=0.02)
    trainer.start_epoch()
    with trainer.step.context():
        image = trainer.feed.batch().image
        stacked = trainer.model.patch_logits(image)
        alone = torch.cat([model.patch_logits(image) for model in trainer.models])
    trainer.step.wait()
    agree = (stacked - alone).abs().amax(dim=(1, 2, 3)) < 1e-3  # shape: [2 models · 4 images]
    # the last bits of a product can decide between two almost equal pairs, and then one image differs
    assert agree.sum() >= 6
    assert not torch.allclose(*alone.chunk(2), atol=1e-2)
