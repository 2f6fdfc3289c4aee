"""One graph: ToMe and PiToMe segmenters with a trained branch through torch.compile, torch.export and ONNX."""

import pytest
import torch

from nsr.tokens import MergedViT, PiToMe, Segmenter, TokenResidual, ToMe
from tokens.vits import images, make, train_a_little

static_rules = pytest.mark.parametrize("rule", [ToMe(r=5), PiToMe(keep=0.7)], ids=["tome", "pitome"])


def segmenter(rule):
    """Two blocks hold every case: attention without and with sizes, both modes of PiToMe."""
    model = Segmenter(MergedViT(make(depth=2), rule, TokenResidual()), 5).eval()
    train_a_little(model)
    return model, images(model.vit.backbone)


@static_rules
def test_captured_whole_with_equal_outputs_and_gradients(rule):
    model, image = segmenter(rule)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    eager_out, compiled_out = model(image), compiled(image)
    torch.testing.assert_close(compiled_out, eager_out, rtol=0, atol=1e-5)
    parameters = dict(model.named_parameters())
    eager = torch.autograd.grad(eager_out.square().sum(), parameters.values())
    ours = torch.autograd.grad(compiled_out.square().sum(), parameters.values())
    for name, a, b in zip(parameters, ours, eager, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3 * float(b.abs().max()) + 1e-6, msg=name)


@pytest.mark.slow
@static_rules
def test_compiled_to_machine_code_equals_eager(rule):
    model, image = segmenter(rule)
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True)(image)
        torch.testing.assert_close(compiled, model(image), rtol=0, atol=1e-5)


@static_rules
def test_exported_program_equals_eager(rule):
    model, image = segmenter(rule)
    program = torch.export.export(model, (image,))
    other = torch.randn_like(image)
    torch.testing.assert_close(program.module()(other), model(other), rtol=0, atol=1e-5)


@static_rules
@pytest.mark.filterwarnings("ignore")  # the exporter warns about its own internals
def test_onnx_runtime_equals_eager(rule, tmp_path):
    import onnxruntime

    model, image = segmenter(rule)
    torch.onnx.export(model, (image,), tmp_path / "model.onnx", dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    other = torch.randn_like(image)
    (logits,) = session.run(None, {session.get_inputs()[0].name: other.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(logits), model(other), rtol=0, atol=1e-4)
