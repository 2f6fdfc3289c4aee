r"""Several segmenters of one backbone and one merge rule, trained as one: every layer is a batched product.

A step of a small model is a thousand short kernels, and a GPU spends more time between them than in them. Models that
are compared with one another have the same shapes and see the same images, so ``V`` of them go through one sequence of
kernels, ``V`` times as large::

    images [B, ...] ──> tokens [V · B, N, D] ── block: x [V, B · N, D] times weights [V, D, D'] ──> … ──> logits

Matching, merging and attention do not know that their batch holds ``V`` models. Models may differ in their null-space
branches: in what these encode, and in having one path, both or no branch at all. Weights that a model lacks are 0 and
stay 0, and decoders at 0 add nothing. A loss summed over models gives each the gradient that it has alone, so this is
as good as training them one by one, which is its plain twin.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from nsr.kernels.tokens import BranchWeights, Source, merge_residual
from nsr.tokens import MPM, MergePlan, Segmenter, host
from nsr.tokens.attention import sized_attention
from nsr.tokens.branch import EventCodes, TokenBranch, spread_codes
from nsr.tokens.matching import autocast_off
from nsr.tokens.vit import TokenState
from nsr.training.segmentation_lengths import TrialLengths

_BRANCHES = "vit.branches"
_DECODER = "vit.spatial.decoder.weight"


class SegmenterStack:
    """The segmenters ``models`` as one function of their stacked weights.

    Weights are stacked parameters ``[V, ...]``; those of the models become views of them, so that a model can be judged
    or saved at any time.

    Args:
        models: On one device, of equal backbones, heads and rules; they may differ in their residuals, but not in the
            widths of those.

    Attributes:
        weights: The stacked parameters, by the name that they have in a model.
        lengths: Where the rule leaves each image a length of its own but keeps that of the sequence.
    """

    def __init__(self, models: Sequence[Segmenter]) -> None:
        self.models = list(models)
        self.vit = models[0].vit
        assert all(model.vit.merger == self.vit.merger for model in models), "one rule"
        assert self.vit.merger is None or self.vit.merger.metric != "learned", "a learned metric is a model's own"
        blocks = self.vit.backbone.blocks
        assert all(host.has_plain_parts(block) for block in blocks), "nothing but norms, attention and MLP"
        parameters = [dict(model.named_parameters()) for model in models]
        self.weights = {
            name: _stacked(name, parameters) for name in dict.fromkeys(n for own in parameters for n in own)
        }
        self.sources = [_source(model) for model in models]
        fixed = isinstance(self.vit.merger, MPM) and self.vit.merger.keep_length
        device = self.weights["head.weight"].device
        self.lengths = TrialLengths(self.vit.depth, device) if fixed else None

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The stacked weights."""
        yield from self.weights.items()

    def state_dict(self) -> dict[str, Tensor]:
        """The weights of every model, which are views of the stacked ones."""
        states = (model.state_dict() for model in self.models)
        return {f"{index}.{name}": value for index, state in enumerate(states) for name, value in state.items()}

    def train(self) -> None:
        """Put every model in training mode."""
        for model in self.models:
            model.train()

    def patch_logits(self, image: Tensor) -> Tensor:
        """Logits of every model on the patch grid, ``[B, C, H, W] -> [V · B, K, h, w]``, model by model."""
        grid = host.grid_of(self.vit.backbone, image)
        kind = _product_kind(image)
        state = TokenState(self._embed(image, kind))
        events: list[EventCodes] = []
        for block in range(self.vit.depth):
            state = self._step(block, state, events, grid, kind)
        features = self._restore(state, events)
        weight, bias = self._named("head")
        classes, room = weight.shape[1], -weight.shape[1] % 8  # products want rows of a multiple of 16 bytes
        with autocast_off(image):
            head = F.pad(weight, (0, 0, 0, room)), F.pad(bias, (0, room))
            logits = _run(_normed_linear)(self._by_model(features), *self._named("norm"), *head, kind)[..., :classes]
        return logits.unflatten(1, (image.shape[0], -1)).flatten(0, 1).transpose(1, 2).unflatten(2, grid)

    def _named(self, module: str) -> tuple[Tensor, Tensor]:
        weight, bias = self.weights[f"{module}.weight"], self.weights[f"{module}.bias"]
        return weight.view_as(weight), bias.view_as(bias)  # the compiler takes a parameter's shape for a constant

    def _by_model(self, x: Tensor) -> Tensor:
        # shape: [V · B, N, D] -> [V, B · N, D]
        return x.unflatten(0, (len(self.models), -1)).flatten(1, 2)

    def _by_sample(self, x: Tensor, tokens: int) -> Tensor:
        # shape: [V, B · N, D] -> [V · B, N, D]
        return x.unflatten(1, (-1, tokens)).flatten(0, 1)

    def _embed(self, image: Tensor, kind: torch.dtype) -> Tensor:
        side = self.vit.backbone.patch_embed.patch_size
        patches = image.unflatten(3, (-1, side[1])).unflatten(2, (-1, side[0])).permute(0, 2, 4, 1, 3, 5)
        patches = patches.flatten(3).flatten(0, 2).to(kind)  # shape: [B · N0, C · side²]
        weight, bias = self._named("vit.backbone.patch_embed.proj")
        with autocast_off(image):
            x = _linear(patches.expand(len(self.models), -1, -1), weight.flatten(2), bias)
        x = x.unflatten(1, (image.shape[0], -1))  # shape: [V, B, N0, D]
        cls = self.weights["vit.backbone.cls_token"].expand(-1, image.shape[0], -1, -1)
        return (torch.cat([cls, x.to(cls.dtype)], dim=2) + self.weights["vit.backbone.pos_embed"]).flatten(0, 1)

    def _step(
        self, index: int, state: TokenState, events: list[EventCodes], grid: tuple[int, int], kind: torch.dtype
    ) -> TokenState:
        """:meth:`nsr.tokens.MergedViT.step` for all models; what their spatial paths need is added to ``events``."""
        merger, name = self.vit.merger, f"vit.backbone.blocks.{index}"
        merges = index in self.vit.layers
        if merger is not None and merges and merger.where == "before_block":
            state = self._merge(index, state, events, state.x, grid)
            merges = False
        size = state.size if merger is not None and merger.proportional else None
        x, tokens = self._by_model(state.x), state.x.shape[1]
        with autocast_off(x):
            qkv = _run(_normed_linear)(x, *self._named(f"{name}.norm1"), *self._named(f"{name}.attn.qkv"), kind)
            qkv = self._by_sample(qkv, tokens).unflatten(2, (3, host.heads_of(self.vit.backbone.blocks[index]), -1))
            attended = self._by_model(sized_attention(qkv, size, state.valid).flatten(2))
            x = _run(_added_linear)(x, attended, *self._named(f"{name}.attn.proj"))
        state = state._replace(x=self._by_sample(x, tokens))
        if merges:
            assert merger is not None
            metric = qkv[:, :, 1].transpose(1, 2) if merger.metric == "keys" else state.x
            state = self._merge(index, state, events, metric, grid)
        x, tokens = self._by_model(state.x), state.x.shape[1]
        layers = (*self._named(f"{name}.norm2"), *self._named(f"{name}.mlp.fc1"), *self._named(f"{name}.mlp.fc2"))
        with autocast_off(x):
            x = _run(_added_mlp)(x, *layers, kind)
        return state._replace(x=self._by_sample(x, tokens))

    def _merge(
        self, index: int, state: TokenState, events: list[EventCodes], metric: Tensor, grid: tuple[int, int]
    ) -> TokenState:
        """The merge event of all models, with the branch of each."""
        merger, prefix = self.vit.merger, self.vit.num_prefix_tokens
        assert merger is not None
        plan = merger.plan(
            metric,
            layer=index,
            depth=self.vit.depth,
            size=state.size,
            num_prefix=prefix,
            valid=state.valid,
            grid=grid,
        )
        if plan is None:
            return state
        if self.lengths is not None:
            plan = self.lengths.cut(plan, index)
        x, size, _, token_of_patch, _ = state
        if size is None:
            size = torch.ones(x.shape[:2], device=x.device)
        if token_of_patch is None:
            token_of_patch = torch.arange(prefix, x.shape[1], device=x.device).expand(x.shape[0], -1)
        tokens = self._merged(index, plan, x, events)
        merged_size = plan.merged_size(size) if plan.size is None else plan.size
        return TokenState(tokens, merged_size, plan.valid, plan.route(token_of_patch))

    def _merged(self, index: int, plan: MergePlan, x: Tensor, events: list[EventCodes]) -> Tensor:
        """The merged tokens of all models, each with the update of its own branch."""
        if not any(model.vit.branches for model in self.models):
            return plan.merge(x)
        if plan.layout is not None and x.dtype != torch.float64:
            weights = self._branch_weights(f"{_BRANCHES}.{index}")
            tokens, codes = merge_residual(x, plan.layout, weights, plan.max_merged, self.sources)
        else:
            tokens, codes = self._merged_one_by_one(f"{_BRANCHES}.{index}", plan, x)
        events.append(EventCodes(codes, plan))
        return tokens

    def _branch_weights(self, name: str) -> BranchWeights:
        def weight(field: str) -> Tensor | None:
            layer = field.removesuffix("_bias")
            return self.weights.get(f"{name}.{layer}.{'weight' if layer == field else 'bias'}")

        return BranchWeights(*map(weight, BranchWeights._fields))  # type: ignore[arg-type]

    def _merged_one_by_one(self, name: str, plan: MergePlan, x: Tensor) -> tuple[Tensor, Tensor]:
        """What the kernels do at once: the branch of each model, asked for its share of the batch."""
        count, width = len(self.models), self.weights[f"{name}.encoder.weight"].shape[1]
        parts = zip(self.models, _shares(plan, count), x.chunk(count), plan.merge(x).chunk(count), strict=True)
        tokens, codes = [], []
        for place, (model, part, own, merged) in enumerate(parts):
            update, code = None, x.new_zeros(*own.shape[:2], width)
            if model.vit.branches:
                branch = model.get_submodule(name)
                weights = {key: self.weights[f"{name}.{key}"][place] for key, _ in branch.named_parameters()}
                update, code = functional_call(branch, weights, (part, own, merged))
            tokens.append(merged if update is None else merged + update)
            codes.append(code)
        return torch.cat(tokens), torch.cat(codes)

    def _restore(self, state: TokenState, events: list[EventCodes]) -> Tensor:
        """Normalised features of the patches, unmerged, with what the spatial paths add: ``[V · B, N0, D]``."""
        x, prefix = self._by_model(state.x), self.vit.num_prefix_tokens
        with autocast_off(x):
            x = self._by_sample(_norm(x, *self._named("vit.backbone.norm")), state.x.shape[1])
        if state.token_of_patch is None:
            return x[:, prefix:]
        patches = x.gather(1, state.token_of_patch.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
        if _DECODER not in self.weights:
            return patches
        with autocast_off(x):
            spread = self._by_model(spread_codes(events, prefix))
            update = torch.bmm(spread, self.weights[_DECODER].to(spread.dtype).mT)
        return patches + self._by_sample(update, patches.shape[1]).to(patches.dtype)


def _source(model: Segmenter) -> Source:
    """What the model's branches encode; without any it makes no difference."""
    branches = [branch for branch in model.vit.branches.values() if isinstance(branch, TokenBranch)]
    return branches[0].settings.encoded if branches else "residual"


def _stacked(name: str, parameters: Sequence[dict[str, nn.Parameter]]) -> nn.Parameter:
    """One parameter of all models, of which theirs become views; 0 for a model that lacks it."""
    parts = [own.get(name) for own in parameters]
    some = next(part for part in parts if part is not None)
    rows = [torch.zeros_like(some) if part is None else part.detach() for part in parts]
    stacked = nn.Parameter(torch.stack(rows), some.requires_grad)
    for part, view in zip(parts, stacked.detach().unbind(0), strict=True):
        if part is not None:
            part.requires_grad_(False)
            part.data = view
    # A branch all of zeros has codes of zeros, so none of it gets a gradient. A decoder that a model with codes lacks
    # would get one.
    coded = [any(key.startswith(_BRANCHES) for key in own) for own in parameters]
    learns = [part is not None or not codes for part, codes in zip(parts, coded, strict=True)]
    if not all(learns):
        factor = stacked.new_tensor(learns).view(-1, *[1] * some.dim())
        stacked.register_hook(lambda grad: grad * factor)
    return stacked


def _shares(plan: MergePlan, count: int) -> list[MergePlan]:
    """The plan of each of ``count`` models, cut out of that of all, without a layout."""
    valid = [None] * count if plan.valid is None else plan.valid.chunk(count)
    parts = zip(plan.group.chunk(count), plan.weight.chunk(count), valid, strict=True)
    return [replace(plan, group=g, weight=w, valid=v, size=None, layout=None) for g, w, v in parts]


def _product_kind(image: Tensor) -> torch.dtype:
    """The format of products: autocast's, or without it that of the images."""
    device = image.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else image.dtype


def _norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    # shape: x [V, M, D], weight [V, D]
    return F.layer_norm(x, x.shape[-1:], eps=1e-6) * weight.unsqueeze(1) + bias.unsqueeze(1)


def _linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    # shape: [V, M, D], [V, D', D], [V, D'] -> [V, M, D']
    # added afterwards, where the compiler joins it with what follows: baddbmm would first copy it to every row
    return torch.bmm(x, weight.to(x.dtype).mT) + bias.to(x.dtype).unsqueeze(1)


def _normed_linear(
    x: Tensor, norm: Tensor, norm_bias: Tensor, weight: Tensor, bias: Tensor, kind: torch.dtype
) -> Tensor:
    return _linear(_norm(x, norm, norm_bias).to(kind), weight, bias)


def _added_linear(x: Tensor, update: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x + _linear(update, weight, bias)


def _added_mlp(
    x: Tensor,
    norm: Tensor,
    norm_bias: Tensor,
    weight: Tensor,
    bias: Tensor,
    weight_out: Tensor,
    bias_out: Tensor,
    kind: torch.dtype,
) -> Tensor:
    hidden = F.gelu(_normed_linear(x, norm, norm_bias, weight, bias, kind))
    return x + _linear(hidden, weight_out, bias_out)


def _compiles(x: Tensor) -> bool:
    return x.is_cuda


@cache
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(function)


def _run(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function, on a GPU compiled once for every number of models and tokens.

    The first arguments are the tokens ``[V, M, D]``, the others weights ``[V, ...]``.
    """

    def call(*arguments: Tensor | torch.dtype) -> Tensor:
        x = arguments[0]
        assert isinstance(x, Tensor)
        if not _compiles(x):
            return function(*arguments)
        for tensor in arguments:
            if isinstance(tensor, Tensor):
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
                if tensor.shape[:2] == x.shape[:2]:
                    torch._dynamo.maybe_mark_dynamic(tensor, 1)
        with warnings.catch_warnings():
            # the compiler looks at the gradients of its arguments, of which not one is a leaf
            warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
            return _compiled(function)(*arguments)

    return call
