"""R copies of one model as one batched model: the same graph, ten splits or seeds, one set of launches.

::

    model_0 ┐                            ┌ parameters [R, ...]  views of ┐
    model_1 ├─ Replicas ── vmap over R ──┤ gradients  [R, ...]  views of ┴ rows [R, P]: one Adam for all, each row
    model_2 ┘                            └ buffers    [R, ...]             with its own rate and its own clipping

Every replica computes exactly what it would on its own; ``tests/training/test_replicas.py`` holds the curves of ten
together against ten one by one and against ``torch.optim``.
"""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils._pytree import tree_map

from nsr.training import adam_native
from nsr.training.onednn_products import onednn_products
from nsr.training.replica_linears import bias_in_products

# Each tensor starts on a 64-byte boundary of its row, as matrix products like it.
_ALIGN = 16


class Section(NamedTuple):
    """Consecutive parameters as one tensor.

    Attributes:
        values: ``[R, P']``.
        place: Where each parameter begins in a row, by the rest of its name.
    """

    values: Tensor
    place: dict[str, int]


class Replicas:
    """Models of equal structure with stacked parameters, and their Adam.

    Args:
        models: The replicas; the first one serves as the template of the structure.
        device: Where to train.

    Attributes:
        parameters: Views of the rows by name, each ``[R, ...]``.
        buffers: Stacked buffers by name, each ``[R, ...]``; without constants of the model, which stay in the template.
        rows: The parameters of each replica in one row, ``[R, P]``.
    """

    def __init__(self, models: Sequence[nn.Module], device: torch.device | str = "cpu") -> None:
        if not models:
            raise ValueError("Replicas needs at least one model.")
        parameters = [dict(model.named_parameters()) for model in models]
        buffers = [dict(model.named_buffers()) for model in models]
        shapes = [{name: p.shape for name, p in own.items()} for own in parameters]
        if any(own != shapes[0] for own in shapes):
            raise ValueError("The replicas differ in structure; build all of them from one configuration.")
        self.count = len(models)
        every = {name: torch.stack([b[name].to(device) for b in buffers]) for name in buffers[0]}
        self.buffers = {name: values for name, values in every.items() if not _constant(name, values)}
        dtype = next(models[0].parameters()).dtype
        self.rows = torch.zeros(self.count, sum(_padded(s) for s in shapes[0].values()), device=device, dtype=dtype)
        self.gradient, self.first, self.second = (torch.zeros_like(self.rows) for _ in range(3))
        self.steps = torch.zeros((), device=device)
        self.parameters = _cut(self.rows, shapes[0])
        self._gradients = _cut(self.gradient, shapes[0])
        for name, stacked in self.parameters.items():
            stacked.copy_(torch.stack([p[name].detach().to(device) for p in parameters]))
            stacked.requires_grad_()
        self._leaves = dict(self.parameters)  # what gradients are taken of
        self.template = models[0].to(device)

    def call(
        self, function: Callable[..., Any], *args: Any, in_dims: tuple[int | None, ...], training: bool = False
    ) -> Any:
        """``function(model, *args)`` for all replicas at once; results have a leading ``R``.

        Args:
            function: Takes the model as a callable (its ``forward``) and the arguments of one replica.
            args: Tensors; those with ``in_dims`` 0 hold one entry a replica, those with ``None`` are shared.
            in_dims: For each argument, see above.
            training: Whether the model is in training mode.
        """
        self.template.train(training)

        def one(parameters: dict[str, Tensor], buffers: dict[str, Tensor], *inputs: Any) -> Any:
            def model(*x: Any, **kw: Any) -> Any:
                return functional_call(self.template, (parameters, buffers), x, kw)

            return function(model, *inputs)

        if self.count == 1:  # nothing to batch: the same without the cost of vmap
            alone = [x if dim is None else x.squeeze(dim) for x, dim in zip(args, in_dims, strict=True)]
            parameters, buffers = ({n: x.squeeze(0) for n, x in d.items()} for d in (self.parameters, self.buffers))
            with onednn_products(self.rows.device):
                return tree_map(lambda out: out.unsqueeze(0), one(parameters, buffers, *alone))
        with bias_in_products(self.rows.device):
            return vmap(one, in_dims=(0, 0, *in_dims), randomness="error")(self.parameters, self.buffers, *args)

    def backward(self, losses: Tensor) -> None:
        """Gradients of each replica's own loss, ``[R]``, in the place of those before."""
        with onednn_products(self.rows.device):
            gradients = torch.autograd.grad(losses.sum(), list(self._leaves.values()), materialize_grads=True)
        torch._foreach_copy_([self._gradients[name] for name in self._leaves], gradients)

    def section(self, prefix: str) -> Section:
        """All parameters whose names begin with ``prefix``, for a kernel that reads them by their place.

        From now on :meth:`backward` takes the gradient of the section, and no longer of its parameters one by one.
        """
        names = [name for name in self.parameters if name.startswith(prefix)]
        first, last = self.parameters[names[0]], self.parameters[names[-1]]
        start = int(first.storage_offset())
        place = {name.removeprefix(prefix): int(self.parameters[name].storage_offset()) - start for name in names}
        stretch = slice(start, int(last.storage_offset()) + _padded(last.shape[1:]))
        values = self.rows.detach()[:, stretch].requires_grad_()
        self._leaves = {name: leaf for name, leaf in self._leaves.items() if name not in names} | {prefix: values}
        self._gradients[prefix] = self.gradient[:, stretch]
        return Section(values, place)

    @torch.no_grad()
    def adam(
        self,
        rate: Tensor,
        weight_decay: float = 0.0,
        max_norm: float | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        """One step of Adam with L2 decay along the gradients of :meth:`backward`.

        Args:
            rate: Learning rate of each replica, ``[R]``; 0 leaves a replica as it is.
            weight_decay: L2 coefficient, added to the gradient.
            max_norm: Clip each replica's gradient to this norm first.
            betas: Decay of the moments.
            eps: Added to the root of the second moment.
        """
        if max_norm is not None:
            norm = self.gradient.norm(dim=1, keepdim=True)
            self.gradient.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        self.steps.add_(1)
        self._adam_rows()(self.rows, self.gradient, self.first, self.second, self.steps, rate, weight_decay, betas, eps)

    def _adam_rows(self) -> Callable[..., None]:
        """The fastest Adam there is."""
        if self.rows.is_cuda and find_spec("triton") is not None:
            from nsr.training import adam_kernel

            return adam_kernel.adam_rows
        if self.rows.device.type == "cpu" and self.rows.dtype == torch.float32 and adam_native.available():
            return adam_native.adam_rows
        return adam_rows

    def module(self, replica: int) -> nn.Module:
        """The template with the weights of one replica: a plain model again."""
        stacked = self.parameters | self.buffers
        own = {name: values[replica].detach() for name, values in stacked.items()}
        self.template.load_state_dict(self.template.state_dict() | own)
        return self.template

    def weights(self) -> list[Tensor]:
        """What an evaluation of the model depends on, each ``[R, ...]``."""
        return [self.rows, *self.buffers.values()]

    @torch.no_grad()
    def keep(self, best: list[Tensor], improved: Tensor) -> None:
        """Copy the :meth:`weights` of the replicas that ``improved [R]`` into ``best``."""
        for kept, now in zip(best, self.weights(), strict=True):
            kept.copy_(torch.where(improved.view(-1, *[1] * (now.dim() - 1)), now, kept))

    @torch.no_grad()
    def restore(self, best: list[Tensor]) -> None:
        """Take the weights that :meth:`keep` has kept."""
        for kept, now in zip(best, self.weights(), strict=True):
            now.copy_(kept)

    def state(self) -> dict[str, Tensor]:
        """Everything that training changes, for a checkpoint."""
        moments = {"rows": self.rows, "first": self.first, "second": self.second, "steps": self.steps}
        return moments | {f"buffer.{name}": b for name, b in self.buffers.items()}

    @torch.no_grad()
    def load(self, state: dict[str, Tensor]) -> None:
        """Go on from a saved :meth:`state`."""
        for name, tensor in self.state().items():
            tensor.copy_(state[name])


def adam_rows(
    weights: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    steps: Tensor,
    rate: Tensor,
    weight_decay: float,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """Adam on rows ``[R, P]``, of which ``steps`` counts the steps, this one included; see :meth:`Replicas.adam`."""
    if weight_decay:
        gradient = gradient + weight_decay * weights
    first.lerp_(gradient, 1 - betas[0])
    second.mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
    size = rate.unsqueeze(1) / (1 - betas[0] ** steps)
    denominator = (second / (1 - betas[1] ** steps)).sqrt().add(eps)
    weights.sub_(size * first / denominator)


def _constant(name: str, values: Tensor) -> bool:
    """Whether a stacked buffer is GIN's ``eps``, never written and the same for all.

    Coefficients that are made of it would otherwise count as each replica's own, and every replica would need kernels
    of its own.
    """
    return name.rpartition(".")[2] == "eps" and bool((values == values[0]).all())


def _cut(rows: Tensor, shapes: dict[str, torch.Size]) -> dict[str, Tensor]:
    """Views ``[R, ...]`` of consecutive stretches of the rows, one a name."""
    views, start = {}, 0
    for name, shape in shapes.items():
        views[name] = rows[:, start : start + shape.numel()].view(rows.shape[0], *shape)
        start += _padded(shape)
    return views


def _padded(shape: torch.Size) -> int:
    return -(-shape.numel() // _ALIGN) * _ALIGN
