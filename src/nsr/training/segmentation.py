r"""Training a segmenter as in the paper: pixel-wise cross-entropy, AdamW, polynomial decay at each iteration.

.. math:: \eta_k = \eta_0 \, (1 - k / K)^{0.9}, \qquad k = 0, \dots, K - 1

A step is device work alone: crops, forward and backward pass, learning rate and update follow counters that live on the
device. So it can be captured in a CUDA graph and replayed without an argument, and several models can be trained side
by side, each on a stream of its own, with the same data in the same order.
"""

import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import isfinite
from typing import Literal

import torch
from torch import Tensor, nn

from nsr.tokens.segmenter import Segmenter
from nsr.training import interruption
from nsr.training.distributed import ALONE, Group, parallel
from nsr.training.pixel_loss import counted_pixels, pixel_cross_entropy
from nsr.training.segmentation_feed import Feed
from nsr.training.segmentation_lengths import TrialLengths
from nsr.training.segmentation_stack import SegmenterStack
from nsr.training.streamed import StreamedStep

Precision = Literal["fp32", "bf16", "fp16"]
_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class SegmentationProtocol:
    """The paper's training of a segmenter.

    Args:
        epochs: Passes over the training split.
        batch: Images in a step. The paper does not say; 16 and 32 end within a point of each other on VOC.
        lr: Initial learning rate.
        weight_decay: AdamW's, on every parameter.
        power: Of the polynomial decay.
        warmup: Steps over which the learning rate first rises linearly.
        precision: Of the forward pass: ``"bf16"`` needs no loss scaling and is the default on CUDA; ``"fp16"`` is
            scaled as in the paper; ``"fp32"`` is plain.
        seed: Of the data order and the crops.
    """

    epochs: int = 100
    batch: int = 16
    lr: float = 1e-4
    weight_decay: float = 1e-4
    power: float = 0.9
    warmup: int = 0
    precision: Precision = "bf16"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.precision not in ("fp32", *_HALF):
            raise ValueError(f"precision is {self.precision!r}; expected 'bf16', 'fp16' or 'fp32'.")


def autocast(device: torch.device, precision: Precision) -> AbstractContextManager:
    """The mixed precision of the forward pass."""
    return torch.autocast(device.type, _HALF.get(precision), enabled=precision in _HALF)


def poly_rate(step: Tensor, total: int, protocol: SegmentationProtocol) -> Tensor:
    """The learning rate of a step, counted from 0, on the device of ``step``."""
    rate = protocol.lr * (1 - step / total).clamp(min=0) ** protocol.power
    return rate * ((step + 1) / protocol.warmup).clamp(max=1) if protocol.warmup else rate


class SegmentationTrainer:
    """One model or a stack of them, its data, its optimiser, and how far it is.

    Args:
        model: The segmenter or segmenters, on their device; parameters that require no gradient stay as they are.
        feed: Its batches.
        protocol: How to train.
        capture: Whether to capture the step in a CUDA graph. The model's shapes must not depend on the image.
        group: The processes that share each batch; their feeds give each its share.
    """

    def __init__(
        self,
        model: Segmenter | SegmenterStack,
        feed: Feed,
        protocol: SegmentationProtocol,
        *,
        capture: bool,
        group: Group = ALONE,
    ) -> None:
        assert not (capture and group.size > 1), "gradients are exchanged by the host"
        self.model, self.feed, self.protocol, self.group = model, feed, protocol, group
        self.models = [model] if isinstance(model, Segmenter) else model.models
        if isinstance(model, Segmenter):
            self.patch_logits: Callable[[Tensor], Tensor] = parallel(_PatchLogits(model), group)
        else:
            assert group.size == 1, "processes share the batches of a single model"
            assert protocol.precision != "fp16", "a model would skip steps because another one's gradients overflow"
            self.patch_logits = model.patch_logits
        self.lengths: TrialLengths | None = None if isinstance(model, Segmenter) else model.lengths
        self.epoch = 0
        self.total = protocol.epochs * feed.steps
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.device = next(iter(trainable.values())).device
        self.step_count = torch.zeros((), device=self.device)
        self.loss_sum = torch.zeros(len(self.models), device=self.device)
        self.rate = torch.tensor(protocol.lr, device=self.device)
        self.optimizer = torch.optim.AdamW(
            trainable.values(),
            lr=self.rate,
            weight_decay=protocol.weight_decay,
            fused=True,
            capturable=capture and self.device.type == "cuda",
        )
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=protocol.precision == "fp16")
        self._trainable = trainable
        for parameter in trainable.values():
            # made here rather than in the first step, so that a state can be loaded into them at any time
            self.optimizer.state[parameter] = {
                "step": torch.zeros((), device=self.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        self.step = StreamedStep(self._update, self.device, capture)
        self._before: list[Tensor] = []  # what an epoch changes, as it was at the beginning

    @property
    def done(self) -> bool:
        """Whether every epoch has been trained."""
        return self.epoch >= self.protocol.epochs

    def start_epoch(self) -> None:
        """Draw the data of the next epoch."""
        self.model.train()
        with self.step.context():
            self.feed.start_epoch(self.epoch)
            self.loss_sum.zero_()
            if self.lengths is not None and any(self.lengths.bound):
                self._before = self._before or [torch.empty_like(value) for value in self._changed_by_steps()]
                torch._foreach_copy_(self._before, self._changed_by_steps())

    def end_epoch(self) -> None:
        """Count the epoch; where sequences outgrew the lengths that were bet on, go back to its beginning instead."""
        if self.lengths is None:
            self.epoch += 1
            return
        self.step.wait()
        before = self.lengths.bound
        if self.lengths.review():
            with self.step.context():
                torch._foreach_copy_(self._changed_by_steps(), self._before)
        else:
            self.epoch += 1
        if self.lengths.bound != before:
            self.step.forget()

    def advance(self) -> None:
        """One step."""
        with self.step.context():
            self.feed.advance()
        self.step()

    def mean_losses(self) -> list[float]:
        """Of each model over the steps since the epoch began; waits for them."""
        self.step.wait()
        return [loss / self.feed.steps for loss in self.loss_sum.tolist()]

    def state(self) -> dict[str, Tensor]:
        """Everything that a resumed run needs, by name; waits for the steps that were called.

        The data needs nothing: what is drawn depends on seed and epoch alone.
        """
        self.step.wait()
        moments = {
            f"optimizer.{name}.{key}": value
            for name, parameter in self._trainable.items()
            for key, value in self.optimizer.state[parameter].items()
        }
        model = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        scaling = {f"scaler.{name}": torch.tensor(value) for name, value in self.scaler.state_dict().items()}
        counters = {"step_count": self.step_count, "loss_sum": self.loss_sum, "random": torch.get_rng_state()}
        lengths = {} if self.lengths is None else self.lengths.state()
        return {**model, **moments, **scaling, **counters, **lengths}

    def load_state(self, state: dict[str, Tensor], epoch: int) -> None:
        """Go on where :meth:`state` was taken, after ``epoch`` epochs."""
        own = self.state()
        if own.keys() != state.keys():
            differing = sorted(own.keys() ^ state.keys())
            raise ValueError(f"The state is of another model: it differs in {', '.join(differing[:4])}.")
        with torch.no_grad():
            for name, value in own.items():
                if name.startswith(("model.", "optimizer.", "step_count", "loss_sum")):
                    value.copy_(state[name])
        scaling = {name.removeprefix("scaler."): v.item() for name, v in state.items() if name.startswith("scaler.")}
        if scaling:
            self.scaler.load_state_dict(scaling)
        if self.lengths is not None:
            self.lengths.load_state(state)
            self.step.forget()
        torch.set_rng_state(state["random"])
        self.epoch = epoch

    def _changed_by_steps(self) -> list[Tensor]:
        moments = [
            value for parameter in self._trainable.values() for value in self.optimizer.state[parameter].values()
        ]
        return [*(parameter.detach() for parameter in self._trainable.values()), *moments, self.step_count]

    def _update(self) -> None:
        batch = self.feed.batch()
        self.optimizer.zero_grad(set_to_none=True)
        with autocast(self.device, self.protocol.precision):
            logits = self.patch_logits(batch.image)
        # of the whole batch, whatever each process's share of the pixels that count
        pixels = self.group.sum(counted_pixels(batch.labels))
        losses = pixel_cross_entropy(logits, batch.labels, pixels)  # shape: [V]
        self.scaler.scale(self.group.summed_gradient(losses.sum())).backward()
        self.rate.copy_(poly_rate(self.step_count, self.total, self.protocol))
        with warnings.catch_warnings():
            # true of the steps before the capture, and meant for optimisers that are never captured
            warnings.filterwarnings("ignore", message="This instance was constructed with capturable=True")
            self.scaler.step(self.optimizer)
        self.scaler.update()
        self.step_count.add_(1)
        self.loss_sum.add_(self.group.sum(losses.detach()))


class _PatchLogits(nn.Module):
    """``Segmenter.patch_logits`` as a forward pass, which is what can be parallel."""

    def __init__(self, model: Segmenter) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor) -> Tensor:
        return self.model.patch_logits(image)


@dataclass(frozen=True)
class TrainingProgress:
    """Where a group of models stands.

    Attributes:
        epoch: Epochs done by the one that is least far.
        epochs: Of all.
        losses: Mean loss of each model in its last epoch.
        seconds: Since the group began.
        remaining: Seconds it will still take.
    """

    epoch: int
    epochs: int
    losses: list[float]
    seconds: float
    remaining: float


def train(
    trainers: Sequence[SegmentationTrainer],
    *,
    watch: Callable[[TrainingProgress], None] | None = None,
    every: float = 1.0,
    after_epoch: Callable[[SegmentationTrainer], None] | None = None,
) -> None:
    """Train models side by side until each has done all its epochs.

    Args:
        trainers: With feeds of equally many steps.
        watch: Told where the group stands, at the end of an epoch and at most every so many seconds; looking makes the
            host wait for the device.
        every: Seconds between two looks.
        after_epoch: Called for each model after each of its epochs, for example to write a checkpoint.
    """
    steps = {trainer.feed.steps for trainer in trainers}
    assert len(steps) == 1, "models trained side by side share their data"
    begin = looked = time.perf_counter()
    already = min(trainer.epoch for trainer in trainers)
    while active := [trainer for trainer in trainers if not trainer.done]:
        for trainer in active:
            trainer.start_epoch()
        for _ in range(*steps):
            for trainer in active:
                trainer.advance()
        for trainer in active:
            trainer.end_epoch()
        interruption.share(active[0].group)
        for trainer in active:
            if after_epoch is not None:
                after_epoch(trainer)
        interruption.leave_if_requested()
        epoch = min(trainer.epoch for trainer in trainers)
        last = active[0].protocol.epochs
        if watch is not None and (time.perf_counter() - looked >= every or epoch == last):
            losses = [loss for trainer in trainers for loss in trainer.mean_losses()]
            if not any(map(isfinite, losses)):
                raise ValueError(
                    f"Every loss is {losses[0]} after epoch {epoch} of {last} (step {epoch * active[0].feed.steps}). "
                    "Try --precision fp32, a lower --lr or a --warmup."
                )
            looked = time.perf_counter()
            rate = (looked - begin) / (epoch - already) if epoch > already else 0.0
            watch(TrainingProgress(epoch, last, losses, looked - begin, rate * (last - epoch)))
    for trainer in trainers:
        trainer.step.wait()
