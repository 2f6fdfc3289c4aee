"""Tree layers in C++ against plain operators in double precision: loss, every gradient, logits and statistics."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nsr.data.tree import tree_task
from nsr.kernels import native
from nsr.training import adam_native, tree
from nsr.training.tree_native import NativeTreeModel

pytestmark = pytest.mark.skipif(native.compiler() is None, reason="there is no C++ compiler")


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    import trees_compared

    return trees_compared


@pytest.mark.parametrize("width", [16, 32])
@pytest.mark.parametrize(
    "name",
    [
        *("gcn", "gcn + nsr", "sage", "sage + nsr", "gin", "gin + nsr"),
        *("gcn + nsr, deep, whole trees", "gin + nsr, whole trees"),
    ],
)
def test_equal_to_the_plain_twin(compared: Any, name: str, width: int) -> None:
    case = replace(compared.CASES[name], width=width)
    exact = compared.results(case, compared.plain, "cpu", torch.float64)
    plain = compared.apart(compared.results(case, compared.plain, "cpu"), exact)
    # As far from double precision as plain operators in single precision are, by a factor of rounding's luck.
    assert compared.apart(compared.results(case, compared.native, "cpu"), exact) <= max(5 * plain, 1e-5)


@pytest.mark.parametrize("whole_trees", [False, True])
@pytest.mark.parametrize("backbone", ["gcn", "sage", "gin"])
def test_equal_at_the_size_of_training(compared: Any, backbone: str, whole_trees: bool) -> None:
    case = compared.Case(backbone, "nsr", width=32, depth=4, trees=16, whole_trees=whole_trees)
    exact = compared.results(case, compared.plain, "cpu", torch.float64)
    assert compared.apart(compared.results(case, compared.native, "cpu"), exact) <= 3e-4


def test_every_case_is_compared(compared: Any) -> None:
    assert len(compared.CASES) == 8


@pytest.mark.parametrize(("whole_trees", "epochs", "bound"), [(True, 4, 1e-4), (False, 2, 3e-2)])
def test_training_is_the_same(compared: Any, whole_trees: bool, epochs: int, bound: float) -> None:
    case = compared.Case("gcn", "nsr", whole_trees=whole_trees)
    assert compared.training_error(case, compared.native, epochs) <= bound


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adam_is_the_same(compared: Any, weight_decay: float) -> None:
    assert compared.adam_error(adam_native.adam_rows, 3, 1100, weight_decay) <= 5e-6


@pytest.mark.parametrize("backbone", ["gcn", "sage", "gin"])
@pytest.mark.parametrize("weight", ["null_space.message", "null_space.gate_hidden", "null_space.output.0"])
def test_what_is_no_number_stays_so(compared: Any, backbone: str, weight: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = compared.models_of

    def poisoned(*args: Any) -> Any:
        models = made(*args)
        models[0].layers[1].get_submodule(weight).weight.data[0, 0] = torch.nan
        return models

    monkeypatch.setattr(compared, "models_of", poisoned)
    loss = compared.results(compared.Case(backbone, "nsr"), compared.native, "cpu")["loss"]
    assert loss.isnan().tolist() == [True, False]


def test_threads_change_nothing(compared: Any) -> None:
    case = compared.Case("sage", "nsr", depth=3)
    before = torch.get_num_threads()
    one = compared.results(case, compared.native, "cpu")
    try:
        torch.set_num_threads(2)
        two = compared.results(case, compared.native, "cpu")
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_taken_on_a_cpu_where_there_is_a_compiler(compared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def native_model(dtype: torch.dtype = torch.float32, **case: Any) -> bool:
        models = compared.models_of(compared.Case(**case), dtype)
        tasks = [tree_task(2, seed) for seed in compared.SEEDS]
        model = tree._Trainer(models, tasks, tree.RULE, None, torch.device("cpu")).model
        return isinstance(model, NativeTreeModel)

    assert native_model(backbone="gcn", variant="nsr")
    assert native_model(backbone="gin", variant="original")
    assert not native_model(backbone="gcn", variant="raw-source")
    assert not native_model(backbone="gcn", variant="nsr", width=8)
    assert not native_model(torch.float64, backbone="gcn", variant="nsr")
    monkeypatch.setattr(tree, "tree_library", lambda _: None)
    assert not native_model(backbone="gcn", variant="nsr")
