"""The gated residual sum: its plain path against the formula, and what an operator has to bear."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from nsr.kernels import (
    gated_residual_sum,
    gated_sum_plain,
    member_library,
    path_for,
    segment_sum,
    unit_coefficient,
)
from nsr.kernels.gated_sum_tables import Tables
from nsr.kernels.native import compiler

needs_a_compiler = pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler")

SOURCES, TARGETS, MEMBERS = 12, 9, 50


def drawn(
    width: int = 8, heads: int = 2, lead: tuple[int, ...] = (), dtype: torch.dtype = torch.float64
) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """Tables, source, target, coefficients; the last two rows have no members."""
    shapes = (
        (SOURCES, width), (SOURCES, width), (TARGETS, width), (TARGETS, width), (TARGETS, heads, width),
        (width, width), (width,),
    )  # fmt: skip
    tables = [torch.randn(*lead, *shape, dtype=dtype, requires_grad=True) for shape in shapes]
    source, target = torch.randint(SOURCES, (MEMBERS,)), torch.randint(TARGETS - 2, (MEMBERS,))
    return tables, source, target, torch.randn(MEMBERS, heads, dtype=dtype, requires_grad=True)


def as_worded(m, a, b, u, c, weight, bias, source, target, t) -> Tensor:
    """The formula, member by member."""
    by_channel = t.repeat_interleave(m.shape[1] // t.shape[1], dim=1)
    hidden = a[source] + b[target] - (t.unsqueeze(2) * c[target]).sum(1)
    gate = torch.sigmoid(F.gelu(hidden) @ weight.T + bias)
    residual = m[source] - by_channel * u[target]
    count = torch.bincount(target, minlength=len(b)).clamp(min=1)
    return torch.zeros_like(b).index_add(0, target, gate * residual) / count.sqrt().unsqueeze(1)


def gradients(out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    torch.manual_seed(1)
    return list(torch.autograd.grad((out * torch.randn_like(out)).sum(), inputs))


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven members a chunk at width 8, so that the last one is not full."""
    monkeypatch.setattr(gated_sum_plain, "_CHUNK_ELEMENTS", {"cpu": 56})


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.usefixtures("small_chunks")
def test_plain_path_is_the_formula(heads: int) -> None:
    tables, source, target, t = drawn(heads=heads)
    ours = gated_residual_sum(*tables, source, target, t)
    expected = as_worded(*tables, source, target, t)
    torch.testing.assert_close(ours, expected)
    assert not ours[-2:].any(), "a row without members is 0"
    for mine, theirs in zip(gradients(ours, [*tables, t]), gradients(expected, [*tables, t]), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_gradients_by_differences() -> None:
    tables, source, target, t = drawn(width=2, heads=1)
    assert torch.autograd.gradcheck(lambda *x: gated_residual_sum(*x[:-1], source, target, x[-1]), (*tables, t))
    assert torch.autograd.gradcheck(lambda m, t: segment_sum(m, source, target, t, TARGETS), (tables[0], t))
    assert torch.autograd.gradcheck(lambda t: unit_coefficient(t, source, target, TARGETS), (t,))


def test_direction_is_the_projection() -> None:
    tables, source, target, t = drawn(heads=2)
    with torch.no_grad():
        t[target == 3] = 0
        t = unit_coefficient(t, source, target, TARGETS)
        u = segment_sum(tables[0], source, target, t, TARGETS)
        residual = tables[0][source] - t.repeat_interleave(4, dim=1) * u[target]
        kept = torch.zeros_like(u).index_add(0, target, t.repeat_interleave(4, dim=1) * residual)
    assert kept.abs().max() < 1e-12, "the residuals are invisible to the sum"
    assert not u[3].any(), "coefficients that are all 0 project nothing away"


def test_replicas_are_runs_of_their_own() -> None:
    tables, source, target, t = drawn(lead=(3,))
    together = gated_residual_sum(*tables, source, target, t)
    alone = torch.stack([gated_residual_sum(*(x[r] for x in tables), source, target, t) for r in range(3)])
    torch.testing.assert_close(together, alone)
    for mine, theirs in zip(gradients(together, [*tables, t]), gradients(alone, [*tables, t]), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("batched", ["tables", "coefficient"])
def test_vmap(batched: str) -> None:
    tables, source, target, t = drawn(lead=(3,))
    many = torch.stack([t, 2 * t, -t]).detach().requires_grad_()
    t = t.detach()

    def one(tables: list[Tensor], t: Tensor) -> Tensor:
        t = unit_coefficient(t, source, target, TARGETS)
        mean = segment_sum(tables[0], source, target, t, TARGETS)
        return gated_residual_sum(*tables[:3], mean, *tables[4:], source, target, t)

    own = batched == "coefficient"
    together = vmap(one, in_dims=(0, 0 if own else None))(tables, many if own else t)
    alone = torch.stack([one([x[r] for x in tables], many[r] if own else t) for r in range(3)])
    torch.testing.assert_close(together, alone)
    inputs = [*tables[:3], *tables[4:], *([many] if own else [])]
    for mine, theirs in zip(gradients(together, inputs), gradients(alone, inputs), strict=True):
        torch.testing.assert_close(mine, theirs)


class Layer(nn.Module):
    """Both operators behind parameters, as a branch uses them."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.message, self.gate, self.output = (nn.Linear(width, width) for _ in range(3))

    def forward(self, h: Tensor, source: Tensor, target: Tensor, t: Tensor) -> Tensor:
        m, nodes = self.message(h), h.shape[0]
        u = segment_sum(m, source, target, t, nodes)
        c = self.gate(u.to(h.dtype)).unsqueeze(1)
        return gated_residual_sum(
            m, self.gate(h), h, u, c, self.output.weight, self.output.bias, source, target, t
        )  # fmt: skip


@pytest.fixture
def layer_inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.randn(10, 16), torch.randint(10, (40,)), torch.randint(10, (40,)), torch.rand(40, 1)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # opcheck looks at its own copies
@pytest.mark.parametrize("kernels", ["plain", pytest.param("native", marks=needs_a_compiler)])
def test_operators_keep_the_contract(kernels: str) -> None:
    dtype = torch.float32 if kernels == "native" else torch.float64
    tables, source, target, t = drawn(width=16, heads=1, lead=(2,), dtype=dtype)
    fresh = [x.detach().clone().requires_grad_() for x in (*tables, t)]
    options = (kernels, "fp32", False, 0)
    torch.library.opcheck(torch.ops.nsr.gated_residual_sum.default, (*fresh[:-1], source, target, fresh[-1], *options))
    torch.library.opcheck(torch.ops.nsr.segment_sum.default, (fresh[0], source, target, fresh[-1], TARGETS, kernels, 0))
    torch.library.opcheck(torch.ops.nsr.unit_coefficient.default, (fresh[-1], source, target, TARGETS, False, 0))


def test_compiled_without_a_graph_break(layer_inputs: tuple[Tensor, ...]) -> None:
    layer = Layer()
    expected = layer(*layer_inputs)
    compiled = torch.compile(layer, fullgraph=True)(*layer_inputs)
    torch.testing.assert_close(compiled, expected)
    parameters = list(layer.parameters())
    for mine, theirs in zip(gradients(compiled, parameters), gradients(expected, parameters), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


def test_autocast_keeps_the_sum_wide(layer_inputs: tuple[Tensor, ...]) -> None:
    layer = Layer()
    expected = layer(*layer_inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = layer(*layer_inputs)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, expected, atol=3e-2, rtol=3e-2)
    ours.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


def test_under_checkpointing(layer_inputs: tuple[Tensor, ...]) -> None:
    layer = Layer()
    again = copy.deepcopy(layer)
    layer(*layer_inputs).square().sum().backward()
    checkpoint(again, *layer_inputs, use_reentrant=False).square().sum().backward()
    for mine, theirs in zip(again.parameters(), layer.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_functional_call_under_vmap(layer_inputs: tuple[Tensor, ...]) -> None:
    layers = [Layer() for _ in range(3)]
    stacked = {
        name: torch.stack([dict(x.named_parameters())[name] for x in layers]) for name, _ in Layer().named_parameters()
    }
    together = vmap(lambda p: functional_call(layers[0], p, layer_inputs))(stacked)
    torch.testing.assert_close(together, torch.stack([layer(*layer_inputs) for layer in layers]))


def test_memory_has_no_member_by_width_tensor() -> None:
    """Every tensor that an operator of ATen makes on the way is smaller than members times width."""
    width, members = 64, 40_000
    tables = [torch.randn(50, width) for _ in range(4)]
    tables += [torch.randn(50, 1, width), torch.randn(width, width), torch.randn(width)]
    source, target, t = torch.randint(50, (members,)), torch.randint(50, (members,)), torch.rand(members, 1)

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            made = out if isinstance(out, tuple | list) else [out]
            self.elements = max([self.elements, *(x.numel() for x in made if isinstance(x, Tensor))])
            return out

    lead = Tables(*(x.unsqueeze(0) for x in tables))
    with Largest() as seen:
        grad = gated_sum_plain.forward(lead, source, target, t)
        gated_sum_plain.backward(grad, lead, source, target, t, True)
    assert seen.elements <= max(gated_sum_plain._CHUNK_ELEMENTS["cpu"], members) < width * members / 4


@needs_a_compiler
def test_path_is_said_in_words() -> None:
    x, t = torch.randn(4, 32), torch.randn(3, 1)
    assert path_for(x, t) == "fused: CPU, fp32 product, in a fixed order"
    assert path_for(x, t, fused=False) == "plain: asked for by fused=False"
    assert "float64" in path_for(x.double(), t)
    assert "width 24" in path_for(torch.randn(4, 24), t)
    assert "width 32 with 4 heads" in path_for(x, torch.randn(3, 4))
    with pytest.raises(ValueError, match="fused=True, but width 24"):
        path_for(torch.randn(4, 24), t, fused=True)


def test_without_a_compiler_the_path_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_library, "load_library", lambda source: None)
    x, t = torch.randn(4, 32), torch.randn(3, 1)
    assert path_for(x, t).startswith("plain: no C++ compiler")
    with pytest.raises(ValueError, match="fused=True, but no C"):
        path_for(x, t, fused=True)


def test_mistakes_are_named() -> None:
    tables, source, target, t = drawn()
    with pytest.raises(ValueError, match=r"mean has shape \(9, 7\); expected \(9, 8\)"):
        gated_residual_sum(*tables[:3], tables[3][:, :7], *tables[4:], source, target, t)
    with pytest.raises(ValueError, match=r"coefficient.unsqueeze\(1\)"):
        gated_residual_sum(*tables, source, target, t[:, 0])
    with pytest.raises(ValueError, match="expected int64"):
        gated_residual_sum(*tables, source.int(), target, t)
    with pytest.raises(ValueError, match="expected 'fp32', 'tf32' or 'bf16'"):
        gated_residual_sum(*tables, source, target, t, precision="fp16")
    with pytest.raises(ValueError, match=r"expected \[E\], \[E\] and \[E, H\]"):
        segment_sum(tables[0], source[:3], target, t, TARGETS)
