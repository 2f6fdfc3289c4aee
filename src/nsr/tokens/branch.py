r"""The null-space branch at a merge event.

::

    members x_i ────────────── merge ──────────────> y = Σ t_i x_i ────────────────── (+) ──> y + W_feat Σ t_i c_i
       │                                               │                               │           feature path
       │  z_i = x_i - y_g      what the merge forgot   │                               │
       ├──────> z ── RMSNorm ── u ──┬── W_enc u ───┐   │                               │
       │                            │             (⊙)── c_i ── the same merge ── W_feat┘
       └── LN_x ─────────> [u ; LN_x(x) ; LN_y(y)] │     │
                                    └── gate ──────┘     └──> S[p] += c_i for every patch p that i covers
                                                                 spatial path: W_sp S at the very end

Only members of groups of two or more are encoded; everybody else's code is exactly 0. The gate's first layer is linear,
so its ``y`` part is one product a group instead of one a member.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nsr.kernels import tokens as kernels
from nsr.residual.branch import Branch
from nsr.tokens.matching import autocast_off
from nsr.tokens.merged_part import MergedPart, merged_part
from nsr.tokens.plan import MergePlan
from nsr.tokens.rule import require_count

_EPS = 1e-6


@dataclass(frozen=True)
class TokenResidual:
    """The settings of the token branch and its controls.

    Args:
        code: Width ``R`` of a member's code.
        hidden: Width of the gate's hidden layer.
        feature: Add the decoded group code to the merged token.
        spatial: Write member codes back to their patches at the end of the backbone.
        source: What is encoded. ``"residual"``: what the merge forgot. ``"raw"``: the member itself, a control.
        post_merge_only: A control that sees the merged token alone, in place of residual and member. It has nothing
            to write back, so ``spatial`` must be off.
    """

    code: int = 64
    hidden: int = 32
    feature: bool = True
    spatial: bool = True
    source: Literal["residual", "raw"] = "residual"
    post_merge_only: bool = False

    def __post_init__(self) -> None:
        require_count("code", self.code, 1)
        require_count("hidden", self.hidden, 1)
        if self.source not in ("residual", "raw"):
            raise ValueError(f"source is {self.source!r}; expected 'residual' or 'raw'.")
        if not (self.feature or self.spatial):
            raise ValueError("feature=False with spatial=False leaves no path; switch one of them on.")
        if self.post_merge_only and (self.spatial or not self.feature):
            raise ValueError("post_merge_only acts on the feature path alone; give feature=True, spatial=False.")
        if self.post_merge_only and self.source != "residual":
            raise ValueError("post_merge_only replaces the source; leave source at its default.")

    @property
    def encoded(self) -> kernels.Source:
        """What a code is made of."""
        return "merged" if self.post_merge_only else self.source


class TokenBranch(Branch):
    r"""Encode what one merge event forgets, and give back what the task finds useful.

    .. math::
        c_i = \sigma\big(W_2\,\mathrm{GELU}(W_1 [u_i ; LN_x(x_i) ; LN_y(y_g)] + b_1) + b_2\big) \odot W_{enc} u_i,
        \qquad u_i = \mathrm{RMSNorm}(x_i - y_g), \qquad \Delta y_g = W_{feat} \sum_{i \in g} t_i c_i.

    The feature decoder starts at zero, so an untrained branch changes nothing. Everything runs in fp32.

    Args:
        dim: Features ``D`` of a token.
        settings: Widths and controls.

    Shapes:
        ``x``: ``[B, N, D]``, ``y``: ``[B, G, D]``; the update is ``[B, G, D]`` or ``None`` without feature path,
        the codes are ``[B, N, R]``.

    Example:
        >>> import torch
        >>> plan = MergePlan(torch.tensor([[0, 1, 1]]), torch.tensor([[1.0, 0.5, 0.5]]), num_groups=2, max_merged=2)
        >>> x = torch.randn(1, 3, 192)
        >>> branch = TokenBranch(192)
        >>> update, codes = branch(plan, x, plan.merge(x))
        >>> bool((update == 0).all()), bool((codes[0, 0] == 0).all()), sum(p.numel() for p in branch.parameters())
        (True, True, 46112)
    """

    def __init__(self, dim: int, settings: TokenResidual | None = None) -> None:
        settings = settings or TokenResidual()
        require_count("dim", dim, 1)
        super().__init__(dim=dim, **asdict(settings))
        self.settings = settings
        self.norm = nn.RMSNorm(dim, eps=_EPS)
        self.norm_x = nn.LayerNorm(dim, eps=_EPS)
        self.norm_y = nn.LayerNorm(dim, eps=_EPS)
        self.encoder = nn.Linear(dim, settings.code, bias=False)
        self.gate_in = nn.Linear(3 * dim, settings.hidden)
        self.gate_out = nn.Linear(settings.hidden, settings.code)
        for layer in (self.encoder, self.gate_in, self.gate_out):
            nn.init.trunc_normal_(layer.weight, std=0.02)
        for layer in (self.gate_in, self.gate_out):
            nn.init.zeros_(layer.bias)
        self.decoder = nn.Linear(settings.code, dim, bias=False) if settings.feature else None
        if self.decoder is not None:
            nn.init.zeros_(self.decoder.weight)

    def merge(self, plan: MergePlan, x: Tensor) -> tuple[Tensor, Tensor]:
        """The merged tokens with their update, ``[B, G, D]``, and the code of each token of ``x``.

        Where the plan is laid out for them, the kernels do it in one go.
        """
        if plan.layout is not None and x.dtype != torch.float64:
            return kernels.merge_residual(x, plan.layout, self.weights(), plan.max_merged, [self.settings.encoded])
        y = plan.merge(x)
        update, codes = self(plan, x, y)
        return (y if update is None else y + update), codes

    def weights(self) -> kernels.BranchWeights:
        """The parameters as the kernels take them."""
        return kernels.BranchWeights(
            norm=self.norm.weight,
            norm_x=self.norm_x.weight,
            norm_x_bias=self.norm_x.bias,
            norm_y=self.norm_y.weight,
            norm_y_bias=self.norm_y.bias,
            encoder=self.encoder.weight,
            gate_in=self.gate_in.weight,
            gate_in_bias=self.gate_in.bias,
            gate_out=self.gate_out.weight,
            gate_out_bias=self.gate_out.bias,
            decoder=None if self.decoder is None else self.decoder.weight,
        )

    def forward(self, plan: MergePlan, x: Tensor, y: Tensor) -> tuple[Tensor | None, Tensor]:
        """The update to add to ``y``, and the code of each token of ``x``.

        Args:
            plan: The merge event.
            x: Tokens before it.
            y: Tokens after it, ``plan.merge(x)``, before any update.
        """
        with autocast_off(x):
            part = merged_part(plan)
            codes = self.codes(part, _wide(part.members.take(x)), _wide(part.groups.take(y)))
            update = None
            if self.decoder is not None:
                group_codes = part.plan.merge(codes)  # shape: [B, K, R]
                update = part.groups.spread(_linear(group_codes, self.decoder.weight)).to(y.dtype)
            return update, part.members.spread(codes)

    def codes(self, part: MergedPart, x: Tensor, y: Tensor) -> Tensor:
        """Codes of the members ``x`` ``[B, M, D]`` of merged groups ``y`` ``[B, K, D]``: ``[B, M, R]``."""
        dim = x.shape[-1]
        unmerged = part.plan.unmerge(y)  # shape: [B, M, D]
        if self.settings.post_merge_only:
            x = source = unmerged
        else:
            source = x if self.settings.source == "raw" else x - unmerged
        # The norm's slope at zero is 1/√eps: unfilled slots are masked before it.
        filled = part.members.filled.unsqueeze(-1)
        u = F.rms_norm(torch.where(filled, source, 1.0), (dim,), _wide(self.norm.weight), _EPS)
        of_u, of_x, of_y = self.gate_in.weight.split(dim, dim=1)
        hidden = (
            _linear(u, of_u, self.gate_in.bias)
            + _linear(_layer_norm(x, self.norm_x), of_x)
            + part.plan.unmerge(_linear(_layer_norm(y, self.norm_y), of_y))
        )
        gate = torch.sigmoid(_linear(F.gelu(hidden), self.gate_out.weight, self.gate_out.bias))
        return torch.where(filled, gate * _linear(u, self.encoder.weight), 0.0)


class SpatialDecoder(Branch):
    """What all events have in common: the decoder of the codes accumulated on the patches.

    It is linear and starts at zero, so an untrained decoder changes nothing.

    Args:
        dim: Features ``D`` of a token.
        settings: Widths and controls; those of the events' branches.

    Shapes:
        ``[B, N0, R] -> [B, N0, D]``.
    """

    def __init__(self, dim: int, settings: TokenResidual | None = None) -> None:
        settings = settings or TokenResidual()
        require_count("dim", dim, 1)
        if not settings.spatial:
            raise ValueError("A spatial decoder belongs to spatial=True; these settings have spatial=False.")
        super().__init__(dim=dim, code=settings.code)
        self.decoder = nn.Linear(settings.code, dim, bias=False)
        nn.init.zeros_(self.decoder.weight)

    def forward(self, accumulated: Tensor) -> Tensor:
        """The update to add to the unmerged patches, in the format of the codes or of the weights, the narrower one."""
        weight = self.decoder.weight
        with autocast_off(accumulated):
            if weight.dtype.itemsize > accumulated.dtype.itemsize:
                weight = weight.to(accumulated.dtype)
            return F.linear(accumulated.to(weight.dtype), weight)


def write_back(codes: Tensor, token_of_patch: Tensor) -> Tensor:
    """What one event adds to the spatial path: each patch gets the code of the token that covered it.

    One gather; it equals the dense product with the ``[N0, N]`` matrix of who covers whom.

    Args:
        codes: Codes of the tokens before the event, ``[B, N, R]``.
        token_of_patch: Which of those tokens covers each patch, ``[B, N0]``: ``num_prefix + p`` at the start, and
            :meth:`MergePlan.route` of it after each event.

    Returns:
        ``[B, N0, R]``, in at least fp32.
    """
    return _wide(codes).gather(1, token_of_patch.unsqueeze(-1).expand(-1, -1, codes.shape[-1]))


class EventCodes(NamedTuple):
    """What one event leaves to the spatial path.

    Attributes:
        codes: Of the tokens ahead of it, ``[B, N, R]``; ``None`` where its branch is off.
        plan: Where it sends them.
    """

    codes: Tensor | None
    plan: MergePlan


def spread_codes(events: Sequence[EventCodes], num_prefix: int) -> Tensor:
    r"""The spatial path of all events, in order: :func:`write_back` of each, summed.

    .. math:: S_p = \sum_e c_e[\tau_e(p)], \qquad \tau_1(p) = num\_prefix + p, \quad \tau_{e+1}(p) = group_e[\tau_e(p)]

    Args:
        events: At least one with codes.
        num_prefix: Leading tokens, which cover no patch.

    Returns:
        ``[B, N0, R]``; in at least fp32, or where kernels do it all at once in the format of the codes.
    """
    codes = [event.codes for event in events if event.codes is not None]
    layouts = [event.plan.layout for event in events if event.plan.layout is not None]
    if len(codes) == len(layouts) == len(events) and codes[0].dtype != torch.float64:
        return kernels.spread(codes, layouts, num_prefix)
    first = events[0].plan.group
    token = torch.arange(num_prefix, first.shape[1], device=first.device).expand(first.shape[0], -1)
    written = []
    for event in events:
        if event.codes is not None:
            written.append(write_back(event.codes, token))
        token = event.plan.route(token)
    return sum(written[1:], start=written[0])


def _wide(x: Tensor) -> Tensor:
    """At least fp32; double stays double."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear layer in the precision of ``x``, also where the model's weights were cast to a half precision."""
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def _layer_norm(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    return F.layer_norm(x, norm.normalized_shape, norm.weight.to(x.dtype), norm.bias.to(x.dtype), norm.eps)
