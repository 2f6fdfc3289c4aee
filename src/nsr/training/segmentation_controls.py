"""The controls of the token branch on the kernels' layout: what a stack trains beside the null-space branch.

The branch itself has kernels; its controls, which differ in what they are fed, are written out here over the members of
merged groups alone, in as few launches as plain operators allow. :meth:`nsr.tokens.branch.TokenBranch.forward` is the
twin, for any plan on any device.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from nsr.kernels.tokens import merge
from nsr.kernels.tokens.layout import list_members
from nsr.tokens import MergePlan
from nsr.tokens.branch import TokenBranch
from nsr.tokens.matching import autocast_off


def is_control(branch: TokenBranch) -> bool:
    """Whether the branch is fed with something else than what the merge forgot."""
    return branch.settings.source == "raw" or branch.settings.post_merge_only


def merge_control(branch: TokenBranch, plan: MergePlan, x: Tensor) -> tuple[Tensor, Tensor]:
    """:meth:`TokenBranch.merge` of a control, plan laid out: tokens ``[B, G, D]``, codes ``[B, N, R]``."""
    assert plan.layout is not None
    layout = list_members(plan.layout, min(plan.max_merged, x.shape[1]))
    filled = (layout.member >= 0).unsqueeze(-1)  # shape: [B, S, 1]
    token = layout.member.clamp(min=0).long().unsqueeze(-1)
    group = torch.where(filled, layout.member_group.unsqueeze(-1), 0).long()
    with autocast_off(x):
        y = merge(x, layout)
        of_group = y.gather(1, group.expand(-1, -1, y.shape[-1])).float()  # shape: [B, S, D]
        own = x.gather(1, token.expand(-1, -1, x.shape[-1])).float()
        source = of_group if branch.settings.post_merge_only else own
        # the norm's slope at zero is 1/√eps: unfilled slots are masked before it
        u = branch.norm(torch.where(filled, source, 1.0))
        hidden = branch.gate_in(torch.cat([u, branch.norm_x(source), branch.norm_y(of_group)], dim=-1))
        code = torch.sigmoid(branch.gate_out(F.gelu(hidden))) * branch.encoder(u)
        code = torch.where(filled, code, 0.0)
        # a sum, because unfilled slots share the first place: they add 0 there
        codes = code.new_zeros(*x.shape[:2], code.shape[-1]).scatter_add(1, token.expand_as(code), code)
        if branch.decoder is None:
            return y, codes
        return y + branch.decoder(merge(codes, layout)).to(y.dtype), codes
