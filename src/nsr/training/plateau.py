"""Learning-rate schedule, early stopping and best epoch of many replicas, on their device and without a branch.

Everything is a tensor over the replicas, so an evaluation needs no synchronisation with the host; only whoever wants to
know whether all have stopped has to look.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class PlateauRule:
    """When to lower the rate and when to stop.

    Attributes:
        mode: Whether the monitored metric should rise or fall.
        rate: The initial learning rate.
        patience: Evaluations without progress before the rate is lowered.
        stop_after: Evaluations without a new best before training stops.
        min_rate: Where lowering ends.
        factor: What the rate is multiplied with.
        threshold: Relative progress that counts for the rate (that of ``torch.optim.lr_scheduler.ReduceLROnPlateau``);
            for the best checkpoint and for stopping any progress counts.
        perfect: A metric that cannot be bettered; a replica that has reached it stops.
        anneal_over: Let the rate fall along half a cosine to 0 over so many evaluations, whatever the metric does.
    """

    mode: Literal["max", "min"]
    rate: float
    patience: int
    stop_after: int
    min_rate: float = 0.0
    factor: float = 0.5
    threshold: float = 1e-4
    perfect: float | None = None
    anneal_over: int | None = None

    def described(self) -> dict[str, Any]:
        """The rule for a record; annealing alone where it is, so that records from before it stay what they were."""
        return {name: value for name, value in asdict(self).items() if name != "anneal_over" or value is not None}


class Plateau:
    """The state of :class:`PlateauRule` for ``R`` replicas.

    Attributes:
        rate: Learning rate of each replica, ``[R]``; read it in the training step, it changes in place.
        best: Best metric so far, ``[R]``.
        best_evaluation: The evaluation it came from, counted from 1, ``[R]``.
        active: False once a replica has stopped, ``[R]``.
    """

    def __init__(self, rule: PlateauRule, replicas: int, device: torch.device) -> None:
        self.rule = rule
        worst = -torch.inf if rule.mode == "max" else torch.inf
        self.rate = torch.full((replicas,), rule.rate, device=device)
        self.best = torch.full((replicas,), worst, device=device)
        self.best_evaluation = torch.zeros(replicas, dtype=torch.int64, device=device)
        self.active = torch.ones(replicas, dtype=torch.bool, device=device)
        self.evaluations = torch.zeros((), dtype=torch.int64, device=device)
        self._reference = self.best.clone()
        self._bad = torch.zeros(replicas, dtype=torch.int64, device=device)

    @torch.no_grad()
    def update(self, metric: Tensor) -> Tensor:
        """Take the metric of one evaluation, ``[R]``; return which running replicas have a new best, ``[R]`` bool."""
        rule = self.rule
        self.evaluations.add_(1)
        if rule.mode == "max":
            improved = metric > self.best
            progressed = metric > self._reference * (1 + rule.threshold)
        else:
            improved = metric < self.best
            progressed = metric < self._reference * (1 - rule.threshold)
        improved &= self.active
        self.best.copy_(torch.where(improved, metric, self.best))
        self.best_evaluation.copy_(torch.where(improved, self.evaluations, self.best_evaluation))
        self._lower(progressed, metric)
        self.active &= self.evaluations - self.best_evaluation < rule.stop_after
        if rule.perfect is not None:
            self.active &= self.best != rule.perfect
        return improved

    def _lower(self, progressed: Tensor, metric: Tensor) -> None:
        """The rates of the next epochs."""
        rule = self.rule
        if rule.anneal_over is not None:
            share = (self.evaluations / rule.anneal_over).clamp(max=1.0)
            self.rate.copy_(rule.rate * (1 + torch.cos(torch.pi * share)) / 2)
            return
        self._reference.copy_(torch.where(progressed, metric, self._reference))
        self._bad.copy_(torch.where(progressed, 0, self._bad + 1))
        tired = self._bad > rule.patience
        lowered = (self.rate * rule.factor).clamp(min=rule.min_rate)
        self.rate.copy_(torch.where(tired & self.active, lowered, self.rate))
        self._bad.masked_fill_(tired, 0)

    def state(self) -> dict[str, Tensor]:
        """The tensors that make up the state, for a checkpoint; :meth:`load` copies them back."""
        names = ("rate", "best", "best_evaluation", "active", "evaluations", "_reference", "_bad")
        return {name.strip("_"): getattr(self, name) for name in names}

    def load(self, state: dict[str, Tensor]) -> None:
        """Go on from a saved :meth:`state`."""
        for name, tensor in self.state().items():
            tensor.copy_(state[name])
