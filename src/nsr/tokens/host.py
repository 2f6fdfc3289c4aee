"""The timm ViT as merging sees it: which models can be served, and the pieces their blocks are run by.

This is the only file that knows timm's insides. A block that merges nothing is called whole; one that merges is run
through its own sub-modules, so LayerScale, DropPath, q/k norms, gates and dropout stay what the model has.
"""

import warnings
from typing import NamedTuple

import torch
from timm.layers import Mlp, PatchDropout, PatchEmbed
from timm.models.vision_transformer import Attention, Block, VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from nsr.kernels import tokens as kernels
from nsr.kernels.tokens import GroupLayout, Matching
from nsr.tokens.attention import biased_attention, key_bias, sized_attention


def require_plain_vit(backbone: nn.Module) -> VisionTransformer:
    """The backbone itself, if every block of it can merge.

    Raises:
        ValueError: Names the part that cannot be served, and why.
    """
    name = type(backbone).__name__
    if not isinstance(backbone, VisionTransformer):
        raise ValueError(f"{name} cannot merge tokens: {_why_not(backbone)} Use a plain timm ViT (ViT, DeiT, DINOv2).")
    if isinstance(backbone.patch_drop, PatchDropout) and backbone.patch_drop.prob > 0:
        raise ValueError(
            f"{name} drops patches while training (patch_drop_rate={backbone.patch_drop.prob}), so its grid cannot be "
            "restored. Create it with patch_drop_rate=0."
        )
    if type(backbone.patch_embed) is not PatchEmbed:
        raise ValueError(
            f"{name} embeds its patches with {type(backbone.patch_embed).__name__}; merging needs timm's plain "
            "PatchEmbed, one token for each cell of a grid."
        )
    for index, block in enumerate(backbone.blocks):
        if type(block) is not Block:
            raise ValueError(
                f"Block {index} of {name} is a {type(block).__name__}; merging happens between attention and MLP of a "
                "plain pre-norm timm Block, which this is not."
            )
        if type(block.attn) is not Attention:
            raise ValueError(
                f"Block {index} of {name} attends with {type(block.attn).__name__}; merging needs timm's plain "
                "Attention, whose softmax takes one bias a key."
            )
    return backbone


def _why_not(backbone: nn.Module) -> str:
    if any("rope" in name.rsplit(".", 1)[-1] for name, _ in backbone.named_modules()) or hasattr(backbone, "rope"):
        return "its rotary position tables are made for the unmerged tokens of a full grid."
    if any("Window" in type(module).__name__ or hasattr(module, "window_size") for module in backbone.modules()):
        return "its attention windows need every token of the grid in its place."
    return "it is not a timm VisionTransformer."


def has_plain_parts(block: nn.Module) -> bool:
    """Whether a block is nothing but its norms, attention and MLP: no scaling, no dropout, no gate, no norm of keys."""
    if not isinstance(block, Block) or not isinstance(block.attn, Attention):
        return False
    attention = block.attn
    idle = (
        block.ls1,
        block.ls2,
        block.drop_path1,
        block.drop_path2,
        attention.q_norm,
        attention.k_norm,
        attention.norm,
    )
    drops = any(isinstance(part, nn.Dropout) and part.p for part in block.modules())
    gated = getattr(attention, "gate", None) is not None
    return all(isinstance(part, nn.Identity) for part in idle) and not drops and not gated


def heads_of(block: nn.Module) -> int:
    """Heads of a block's attention."""
    assert isinstance(block, Block)
    assert isinstance(block.attn, Attention)
    return block.attn.num_heads


def grid_of(backbone: VisionTransformer, image: Tensor) -> tuple[int, int]:
    """The patch grid of a batch of images.

    Raises:
        ValueError: The images do not fit the backbone.
    """
    if image.dim() != 4:
        raise ValueError(f"Images must have shape [B, C, H, W], got {tuple(image.shape)}.")
    embed = backbone.patch_embed
    size, patch = (image.shape[2], image.shape[3]), embed.patch_size
    if embed.strict_img_size and size != tuple(embed.img_size):
        raise ValueError(
            f"The images are {_text(size)}, the backbone takes {_text(embed.img_size)}. Resize them, or give MergedViT "
            f"img_size={_nearest(size, patch)} (its position embeddings are resized once), or create the backbone "
            "with dynamic_img_size=True."
        )
    if not embed.dynamic_img_pad and (size[0] % patch[0] or size[1] % patch[1]):
        raise ValueError(
            f"The images are {_text(size)}, no multiple of the patch {_text(patch)}. Resize or pad them, for example "
            f"to {_text(_nearest(size, patch))}, or create the backbone with dynamic_img_pad=True."
        )
    return embed.dynamic_feat_size(size)


def resize(backbone: VisionTransformer, img_size: int | tuple[int, int]) -> None:
    """Make the backbone take images of another size; position embeddings are resized bicubically, once."""
    size = (img_size, img_size) if isinstance(img_size, int) else img_size
    patch = backbone.patch_embed.patch_size
    if size[0] % patch[0] or size[1] % patch[1] or min(size) < 1:
        raise ValueError(
            f"img_size {_text(size)} is no multiple of the patch {_text(patch)}; {_text(_nearest(size, patch))} is."
        )
    backbone.set_input_size(img_size=size)


def embed(backbone: VisionTransformer, image: Tensor) -> Tensor:
    """Everything before the blocks: ``[B, C, H, W] -> [B, prefix + N0, D]``."""
    x = backbone._pos_embed(_embed_patches(backbone.patch_embed, image))
    return backbone.norm_pre(x)


def _embed_patches(embed: PatchEmbed, image: Tensor) -> Tensor:
    """``embed(image)``; on CUDA as one matrix product.

    cuDNN's convolution of 3 channels with stride 16 in half precision takes several times as long.
    """
    proj, (height, width) = embed.proj, embed.patch_size
    if not kernels.use_kernels(image, proj.weight) or not embed.flatten or embed.dynamic_img_pad:
        return embed(image)
    patches = image.unflatten(3, (-1, width)).unflatten(2, (-1, height)).permute(0, 2, 4, 1, 3, 5)
    return embed.norm(F.linear(patches.flatten(3).flatten(1, 2), proj.weight.flatten(1), proj.bias))


class Attended(NamedTuple):
    """A block after its attention, and what a matching rule may compare.

    Attributes:
        x: ``x + attn(norm1(x))``, ``[B, N, D]``.
        normed: ``norm1(x)``, ``[B, N, D]``; ``None`` where a kernel had it in its registers alone.
        keys: ``[B, H, N, d_h]``, after any k-norm.
        layout: The groups that these keys make, where they were matched beside the attention.
    """

    x: Tensor
    normed: Tensor | None
    keys: Tensor
    layout: GroupLayout | None = None


def warn_of_hooks(block: Block, index: int) -> None:
    """Say that hooks on a block do not run where the block is run through its parts."""
    for name, module in (("", block), (".attn", block.attn)):
        if module._forward_hooks or module._forward_pre_hooks:
            warnings.warn(
                f"blocks[{index}]{name} has forward hooks, which do not run where tokens merge or have merged: the "
                "block goes through its own parts there. Hook those (norm1, attn.qkv, attn.proj, norm2, mlp), or read "
                "features with forward_intermediates.",
                stacklevel=2,
            )


def attention_half(
    block: Block, x: Tensor, size: Tensor | None, valid: Tensor | None, matching: Matching | None = None
) -> Attended:
    """``x + attn(norm1(x))``, each key counted ``size`` times; ``valid`` is ``False`` at padding: ``[B, N]`` both.

    Where ``matching`` is given and the kernels can, the keys are matched meanwhile.
    """
    assert isinstance(block.attn, Attention)
    attn = block.attn
    if matching is not None and valid is None and has_plain_parts(block) and _in_half_precision(x, attn.proj):
        qkv = norm_linear(x, block.norm1, attn.qkv, None).reshape(*x.shape[:2], 3, attn.num_heads, -1)
        x, layout = kernels.attend_beside(x, qkv, size, attn.proj.weight, attn.proj.bias, matching)
        return Attended(x, None, qkv[:, :, 1].transpose(1, 2), layout)
    normed = block.norm1(x)
    out, keys = _attend(attn, normed, size, valid)
    return Attended(x + block.drop_path1(block.ls1(out)), normed, keys)


def mlp_half(block: Block, x: Tensor) -> Tensor:
    """``x + mlp(norm2(x))``."""
    mlp: nn.Module = block.mlp
    plain = has_plain_parts(block) and isinstance(getattr(mlp, "norm", None), nn.Identity)
    if type(mlp) is not Mlp or not plain or not _has_kernel(x, mlp.fc2):
        return x + block.drop_path2(block.ls2(mlp(block.norm2(x))))
    return linear_add(x, norm_linear(x, block.norm2, mlp.fc1, mlp.act), mlp.fc2)


def norm_linear(x: Tensor, norm: nn.Module, linear: nn.Module, act: nn.Module | None = None) -> Tensor:
    """``act(linear(norm(x)))``; as one kernel where it can be."""
    known = isinstance(norm, nn.LayerNorm) and norm.weight is not None and norm.bias is not None
    gelu = type(act) is nn.GELU and act.approximate == "none"
    if known and (gelu or act is None) and _has_kernel(x, linear):
        return kernels.norm_linear(x, norm.weight, norm.bias, norm.eps, linear.weight, linear.bias, gelu)
    out = linear(norm(x))
    return out if act is None else act(out)


def linear_add(x: Tensor, a: Tensor, linear: nn.Module) -> Tensor:
    """``x + linear(a)``; as one kernel where it can be."""
    return kernels.linear_add(x, a, linear.weight, linear.bias) if _has_kernel(x, linear) else x + linear(a)


def _in_half_precision(x: Tensor, linear: nn.Module) -> bool:
    """Whether a layer and its input are in one half precision, on a device with kernels, and want no gradient."""
    half = type(linear) is nn.Linear and x.dtype == linear.weight.dtype in (torch.float16, torch.bfloat16)
    half = half and not torch.is_autocast_enabled(x.device.type)
    return half and not torch.is_grad_enabled() and kernels.use_kernels(x)


def _has_kernel(x: Tensor, linear: nn.Module) -> bool:
    """Whether the kernels have this layer: on a narrow stream ``x``, under the same conditions."""
    return x.shape[-1] <= kernels.WIDEST and _in_half_precision(x, linear) and linear.bias is not None


def _qkv(attn: Attention, x: Tensor) -> Tensor:
    # shape: [B, N, D] -> [B, N, 3, H, d_h]
    return attn.qkv(x).reshape(*x.shape[:2], 3, attn.num_heads, -1)


def _attend(attn: Attention, x: Tensor, size: Tensor | None, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    batch, tokens, _ = x.shape
    qkv = _qkv(attn, x)
    dropout = attn.attn_drop.p if attn.training else 0.0
    if isinstance(attn.q_norm, nn.Identity) and isinstance(attn.k_norm, nn.Identity):
        out = sized_attention(qkv, size, valid, dropout)  # shape: [B, N, H, d_h]
        k = qkv[:, :, 1].transpose(1, 2)
    else:
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # shape: [B, H, N, d_h]
        q, k = attn.q_norm(q), attn.k_norm(k)
        out = biased_attention(q, k, v, key_bias(size, valid), dropout).transpose(1, 2)
    out = attn.norm(out.reshape(batch, tokens, -1))
    gate = getattr(attn, "gate", None)  # only recent versions of timm have gated attention
    if gate is not None:
        out = out * torch.sigmoid(gate(x))
    return attn.proj_drop(attn.proj(out)), k


def _nearest(size: tuple[int, ...], patch: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(max(1, round(s / p)) * p for s, p in zip(size, patch, strict=True))


def _text(size: tuple[int, ...]) -> str:
    return " × ".join(map(str, size))
