"""The trainer against a plain loop; resuming, company, workers and capture change nothing."""

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch.nn import functional as F

from nsr.data.segmentation.crops import epoch_crops
from nsr.data.segmentation.resident import load_resident, resident_batch
from nsr.data.segmentation.shapes import shapes
from nsr.data.segmentation.workers import worker_batches
from nsr.tokens import MPM, MergedViT, Segmenter, TokenResidual, ToMe
from nsr.training import checkpoint
from nsr.training.segmentation import SegmentationProtocol, SegmentationTrainer, poly_rate, train
from nsr.training.segmentation_evaluation import evaluate
from nsr.training.segmentation_feed import EpochDraws, ResidentFeed, WorkerFeed, place
from nsr.training.segmentation_metrics import confusion_matrix

WINDOW = (32, 32)
PROTOCOL = SegmentationProtocol(epochs=3, batch=4, lr=1e-3, precision="fp32", seed=5)
SPLIT = shapes("train", 14)  # two images are left out of every epoch


@pytest.fixture(scope="module")
def resident():
    return load_resident(SPLIT)


def model(rule=None, residual=None) -> Segmenter:
    torch.manual_seed(0)
    backbone = VisionTransformer(img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2, num_classes=0)
    return Segmenter(MergedViT(backbone, rule, residual), 5)


def trainer(resident, net: Segmenter, protocol=PROTOCOL, capture=False) -> SegmentationTrainer:
    feed = ResidentFeed(resident, EpochDraws(resident.sizes, WINDOW, protocol.batch, protocol.seed))
    return SegmentationTrainer(net, feed, protocol, capture=capture)


def weights(net: Segmenter) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in net.state_dict().items()}


class TestSchedule:
    def test_polynomial_decay_at_each_iteration(self) -> None:
        rates = poly_rate(torch.tensor([0.0, 50.0, 99.0]), 100, SegmentationProtocol())
        assert rates.tolist() == pytest.approx([1e-4, 1e-4 * 0.5**0.9, 1e-4 * 0.01**0.9])

    def test_warm_up_rises_to_the_decaying_rate(self) -> None:
        protocol = SegmentationProtocol(warmup=10)
        rates = poly_rate(torch.tensor([0.0, 4.0, 9.0, 20.0]), 100, protocol)
        decay = [(1 - k / 100) ** 0.9 * 1e-4 for k in (0, 4, 9, 20)]
        assert rates.tolist() == pytest.approx([decay[0] * 0.1, decay[1] * 0.5, decay[2], decay[3]])

    def test_nonsense(self) -> None:
        with pytest.raises(ValueError, match="epochs must be at least 1, got 0"):
            SegmentationProtocol(epochs=0)
        with pytest.raises(ValueError, match="precision is 'int8'"):
            SegmentationProtocol(precision="int8")


class TestTraining:
    def test_equals_a_plain_loop(self, resident) -> None:
        net, plain = model(ToMe(r=3), TokenResidual()), model(ToMe(r=3), TokenResidual())
        train([trainer(resident, net)])

        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=1e-4, foreach=False)
        step, total = 0, 9
        for epoch in range(3):
            crops = epoch_crops(resident.sizes, WINDOW, seed=5, epoch=epoch)
            for image, labels in worker_batches(SPLIT, crops, WINDOW, 4, workers=0):
                optimizer.param_groups[0]["lr"] = 1e-3 * (1 - step / total) ** 0.9
                optimizer.zero_grad()
                F.cross_entropy(plain(image), labels, ignore_index=255).backward()
                optimizer.step()
                step += 1
        assert step == total
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(net.state_dict()[name], value, rtol=0, atol=2e-5, msg=name)

    def test_it_learns(self, resident) -> None:
        losses = []
        train(
            [trainer(resident, model(), SegmentationProtocol(epochs=8, batch=4, lr=3e-3, precision="fp32"))],
            watch=lambda progress: losses.append(progress.losses[0]),
            every=0,
        )
        assert len(losses) == 8
        assert losses[-1] < 0.8 * losses[0]

    def test_a_pair_starts_alike_and_sees_the_same(self, resident) -> None:
        base, nsr = model(ToMe(r=3)), model(ToMe(r=3), TokenResidual())
        nsr.load_state_dict(base.state_dict(), strict=False)
        first: list[list[float]] = []
        train(
            [trainer(resident, net, SegmentationProtocol(1, 12, precision="fp32")) for net in (base, nsr)],
            watch=lambda progress: first.append(progress.losses),
        )
        assert first[0][0] == first[0][1]  # one step an epoch: the loss before any update

    def test_company_changes_nothing(self, resident) -> None:
        alone = [model(), model(MPM((0, 1)), TokenResidual())]
        for net in alone:
            train([trainer(resident, net)])
        together = [model(), model(MPM((0, 1)), TokenResidual())]
        train([trainer(resident, net) for net in together])
        for one, other in zip(alone, together, strict=True):
            assert all(torch.equal(one.state_dict()[name], value) for name, value in other.state_dict().items())

    def test_frozen_weights_stay(self, resident) -> None:
        net = model(ToMe(r=3), TokenResidual())
        net.vit.freeze_backbone()
        before = weights(net)
        train([trainer(resident, net)])
        moved = {name for name, value in net.state_dict().items() if not torch.equal(value, before[name])}
        assert {"head.weight", "norm.weight", "vit.spatial.decoder.weight"} <= moved
        assert not any(name.startswith("vit.backbone") for name in moved)

    def test_bf16_trains(self, resident) -> None:
        net = model(ToMe(r=3), TokenResidual())
        train([trainer(resident, net, SegmentationProtocol(1, 4, precision="bf16"))])
        assert all(value.isfinite().all() and value.dtype == torch.float32 for value in net.state_dict().values())

    def test_a_batch_larger_than_the_split(self, resident) -> None:
        with pytest.raises(ValueError, match="A batch of 16 needs at least as many images; the split has 14"):
            trainer(resident, model(), SegmentationProtocol())


class TestResume:
    def test_the_same_final_weights_to_the_bit(self, resident, tmp_path) -> None:
        configuration = {"merger": "tome"}
        whole = model(ToMe(r=3), TokenResidual())
        train([trainer(resident, whole)])

        class Killed(Exception):
            pass

        def save_and_die(at: SegmentationTrainer) -> None:
            if at.epoch == 2:
                checkpoint.save(tmp_path / "last.safetensors", at.state(), configuration, at.epoch)
                raise Killed

        with pytest.raises(Killed):
            train([trainer(resident, model(ToMe(r=3), TokenResidual()))], after_epoch=save_and_die)
        torch.manual_seed(99)
        resumed = model(ToMe(r=3), TokenResidual())
        again = trainer(resident, resumed)
        found = checkpoint.load(tmp_path / "last.safetensors", configuration)
        assert found is not None
        again.load_state(found.state, found.epoch)
        assert again.epoch == 2
        train([again])
        assert all(torch.equal(whole.state_dict()[name], value) for name, value in resumed.state_dict().items())

    def test_the_state_of_another_model(self, resident) -> None:
        state = trainer(resident, model(ToMe(r=3), TokenResidual())).state()
        with pytest.raises(ValueError, match=r"another model: it differs in model\.vit\.branches"):
            trainer(resident, model()).load_state(state, 1)


class TestFeeds:
    def test_workers_and_resident_data_train_alike(self, resident) -> None:
        net, other = model(), model()
        train([trainer(resident, net)])
        draws = EpochDraws(resident.sizes, WINDOW, 4, PROTOCOL.seed)
        train([SegmentationTrainer(other, WorkerFeed(SPLIT, draws, torch.device("cpu"), 0), PROTOCOL, capture=False)])
        for name, value in net.state_dict().items():
            torch.testing.assert_close(other.state_dict()[name], value, rtol=0, atol=2e-5, msg=name)

    def test_photometric_draws_reach_the_batch(self, resident) -> None:
        feeds = [ResidentFeed(resident, EpochDraws(resident.sizes, WINDOW, 4, 0, photometric=p)) for p in (True, False)]
        for feed in feeds:
            feed.start_epoch(0)
        distorted, plain = (feed.batch() for feed in feeds)
        assert torch.equal(distorted.labels, plain.labels)
        assert not torch.equal(distorted.image, plain.image)

    def test_a_small_split_goes_to_the_device(self) -> None:
        sizes, data = place(SPLIT, torch.device("cpu"))
        assert data is not None
        assert len(sizes) == len(data) == 14


class TestEvaluation:
    def test_centre_crops_from_either_side(self, resident) -> None:
        net = model(MPM((0, 1)), TokenResidual()).train()
        whole = evaluate(net, resident, WINDOW, batch=5)
        assert torch.equal(whole, evaluate(net, SPLIT, WINDOW, batch=3))  # neither batch nor place matters
        assert net.training
        assert whole.sum() > 0.8 * 14 * 32 * 32

    def test_sliding_windows_cover_every_pixel(self, resident) -> None:
        net = model().eval()
        found = evaluate(net, resident, WINDOW, stride=(24, 24))
        assert found.sum() == sum(int((SPLIT[i][1] != 255).sum()) for i in range(14))
        assert torch.equal(found, evaluate(net, SPLIT, WINDOW, stride=(24, 24)))

    def test_perfect_predictions(self) -> None:
        labels = torch.tensor([[0, 1, 255]])
        assert confusion_matrix(labels, torch.tensor([[0, 1, 0]]), 2).tolist() == [[1, 0], [0, 1]]


def losses_of(trainers: list[SegmentationTrainer]) -> list[list[float]]:
    found: list[list[float]] = []
    train(trainers, watch=lambda progress: found.append(progress.losses), every=0)
    return found


@pytest.mark.gpu
class TestOnGpu:
    """Losses rather than weights are compared: Adam blows the noise of vanishing gradients up to full steps."""

    @pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
    @pytest.mark.parametrize("rule", [None, ToMe(r=3), MPM((0, 1), keep_length=True)])
    def test_captured_steps_equal_eager_ones(self, rule, precision) -> None:
        data = load_resident(SPLIT, "cuda")
        protocol = SegmentationProtocol(4, 4, lr=1e-3, precision=precision)
        residual = None if rule is None else TokenResidual()
        eager = trainer(data, model(rule, residual).cuda(), protocol)
        captured = trainer(data, model(rule, residual).cuda(), protocol, capture=True)
        expected, found = losses_of([eager]), losses_of([captured])
        assert captured.step.graph is not None
        tolerance = 1e-3 if precision == "fp32" else 2e-2
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=tolerance, atol=0)

    def test_side_by_side_equals_one_by_one(self) -> None:
        data = load_resident(SPLIT, "cuda")

        def start() -> list[SegmentationTrainer]:
            nets = [model(ToMe(r=r), TokenResidual()).cuda() for r in (2, 3, 5)]
            return [trainer(data, net, capture=True) for net in nets]

        alone = [losses_of([one]) for one in start()]
        together = losses_of(start())
        for index, expected in enumerate(alone):
            assert [epoch[index] for epoch in together] == pytest.approx([epoch[0] for epoch in expected], rel=1e-3)

    def test_crops_equal_those_of_the_host(self, resident) -> None:
        crops = epoch_crops(resident.sizes, WINDOW, seed=1, epoch=0)
        host = resident_batch(resident, crops, WINDOW)
        feed = ResidentFeed(load_resident(SPLIT, "cuda"), EpochDraws(resident.sizes, WINDOW, 14, seed=1))
        feed.start_epoch(0)
        device = feed.batch()  # by the compiled kernel
        torch.testing.assert_close(device.image.cpu(), host.image, rtol=0, atol=1e-3)
        assert torch.equal(device.labels.cpu(), host.labels)
