"""Inference at a fixed batch and image size: compiled, and replayed as one CUDA graph.

A merged ViT is many small launches. At a fixed shape they are recorded once, and a call is one copy of the images and
one replay. ToMe, PiToMe and DTEM have static shapes. The counts of MPM and ALGM depend on the image, and reading a
length back from the device is something that no graph can record: MPM is captured at the full length, with padding
that attention skips; ALGM is refused, with the reason.
"""

import copy
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from nsr.tokens.mpm import MPM
from nsr.tokens.rule import MergeRule
from nsr.tokens.vit import MergedViT

_WARM_UP = 3


class Optimized:
    """A function of one batch of images, at one shape.

    Its output tensor is its own: the next call overwrites it.

    Args:
        run: The function, on tensors alone.
        example: A batch; device, dtype and shape of every later one.
        capture: Replay it from a CUDA graph. Needs CUDA.
    """

    def __init__(self, run: Callable[[Tensor], Tensor], example: Tensor, *, capture: bool) -> None:
        self._run = run
        self._image = example.clone()
        self._output: Tensor | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        if capture:
            self._capture()

    def __call__(self, image: Tensor) -> Tensor:
        """The model's output for ``image``."""
        own = self._image
        if image.shape != own.shape or image.dtype != own.dtype or image.device != own.device:
            raise ValueError(
                f"This model was optimised for {_text(own)}; got {_text(image)}. Optimise another one for that shape, "
                "or call the model itself."
            )
        if self._graph is None:
            with torch.inference_mode():
                return self._run(image)
        own.copy_(image)
        self._graph.replay()
        assert self._output is not None
        return self._output

    @torch.inference_mode()
    def _capture(self) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP):
                self._run(self._image)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._output = self._run(self._image)


def optimize(
    model: nn.Module,
    batch: int,
    size: int | tuple[int, int],
    *,
    compiled: bool = True,
    capture: bool | None = None,
) -> Optimized:
    """Prepare a merged ViT, a segmenter, or any model with images in and one tensor out, for one shape.

    The model is used as it is now: later changes of its weights are seen, a change of its structure is not.

    Args:
        model: The model, in evaluation mode, on its device and in its precision.
        batch: Images a call.
        size: Height and width of the images, or one number for both.
        compiled: Compile it with ``torch.compile`` first; takes a minute, and pays back a fifth to a third.
        capture: Replay a CUDA graph; by default where the model is on a GPU.

    Returns:
        A callable from images ``[batch, 3, height, width]`` to the model's output.

    Raises:
        ValueError: The model is in training mode, or its shapes depend on the image.

    Example:
        >>> fast = optimize(segmenter.eval().cuda().bfloat16(), batch=32, size=512)  # doctest: +SKIP
        >>> logits = fast(images)  # doctest: +SKIP
    """
    if model.training:
        raise ValueError("The model is in training mode; call .eval() on it first.")
    parameter = next(model.parameters())
    on_gpu = parameter.is_cuda
    capture = on_gpu if capture is None else capture
    if capture and not on_gpu:
        raise ValueError(f"capture=True needs the model on a GPU; it is on {parameter.device}.")
    if capture:
        model = _at_full_length(model)
    growing = _image_dependent(model)
    if capture and growing is not None:
        raise ValueError(
            f"{growing} merges a number of tokens that depends on the image, so its launches cannot be captured. Give "
            "capture=False, or use ToMe, PiToMe, DTEM or MPM."
        )
    height, width = (size, size) if isinstance(size, int) else size
    example = torch.randn(batch, 3, height, width, device=parameter.device, dtype=parameter.dtype)
    run = torch.compile(model, dynamic=False, fullgraph=growing is None) if compiled else model
    return Optimized(run, example, capture=capture)


def _at_full_length(model: nn.Module) -> nn.Module:
    """The model, of the same modules, with an MPM that keeps the length of the sequence; itself if it has no MPM."""
    if isinstance(model, MergedViT) and isinstance(model.merger, MPM):
        vit = copy.copy(model)
        vit.merger = replace(model.merger, keep_length=True)
        return vit
    children = {name: _at_full_length(child) for name, child in model.named_children()}
    if all(child is model._modules[name] for name, child in children.items()):
        return model
    twin = copy.copy(model)
    twin._modules = {**model._modules, **children}
    return twin


def _image_dependent(model: nn.Module) -> MergeRule | None:
    """The rule of this model whose shapes depend on the image, if it has one."""
    for module in model.modules():
        if isinstance(module, MergedViT) and module.merger is not None:
            if isinstance(module.merger, MPM) and module.merger.keep_length:
                continue
            patches = module.backbone.patch_embed.num_patches
            if any(module.merger.merge_count(layer, patches, module.depth) is None for layer in module.layers):
                return module.merger
    return None


def _text(x: Tensor) -> str:
    return f"{tuple(x.shape)} {x.dtype} on {x.device}"
