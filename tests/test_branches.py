import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import nsr


def host(dim: int = 8, code: int = 16) -> nn.Module:
    return nn.ModuleDict({"layer": nn.Linear(3, 3), "lost": nsr.NullSpaceResidual(dim, code=code)})


def randomise(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model


def test_round_trip_holds_the_branch_and_nothing_else(tmp_path) -> None:
    first, second = randomise(host()), randomise(host())
    before = second["layer"].weight.clone()
    nsr.save(first, tmp_path / "branch.safetensors")
    nsr.load(second, tmp_path / "branch.safetensors")
    for key, value in first["lost"].state_dict().items():
        assert torch.equal(second["lost"].state_dict()[key], value)
    assert torch.equal(second["layer"].weight, before)


def test_a_bare_branch_is_its_own_model(tmp_path) -> None:
    first, second = randomise(nsr.NullSpaceResidual(8)), nsr.NullSpaceResidual(8)
    nsr.save(first, tmp_path / "b.safetensors")
    nsr.load(second, tmp_path / "b.safetensors")
    assert torch.equal(first.decoder.weight, second.decoder.weight)


def test_another_width_is_refused_and_nothing_is_written(tmp_path) -> None:
    nsr.save(randomise(host(dim=4)), tmp_path / "b.safetensors")
    model = randomise(host())
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ValueError, match="another branch at 'lost'"):
        nsr.load(model, tmp_path / "b.safetensors")
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_other_sites_are_refused(tmp_path) -> None:
    nsr.save(host(), tmp_path / "b.safetensors")
    with pytest.raises(ValueError, match="Attach with the same selection"):
        nsr.load(nn.ModuleDict({"other": nsr.NullSpaceResidual(8, code=16)}), tmp_path / "b.safetensors")


def test_files_that_are_no_checkpoint_are_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="no branch checkpoint at"):
        nsr.load(host(), tmp_path / "missing.safetensors")
    (tmp_path / "torn.safetensors").write_bytes(b"\x00" * 7)
    with pytest.raises(ValueError, match="not a readable"):
        nsr.load(host(), tmp_path / "torn.safetensors")
    save_file({"a": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="not a branch checkpoint"):
        nsr.load(host(), tmp_path / "other.safetensors")


def test_tensors_that_contradict_their_configuration_are_refused(tmp_path) -> None:
    model = host()
    configs = json.dumps({"lost": model["lost"].config})
    metadata = {"format": "nsr-branches-1", "branches": configs}
    save_file({"lost.norm.weight": torch.zeros(3)}, tmp_path / "b.safetensors", metadata=metadata)
    with pytest.raises(ValueError, match="does not fit the model"):
        nsr.load(model, tmp_path / "b.safetensors")


def test_a_model_without_branches_is_told_how_to_get_one() -> None:
    with pytest.raises(ValueError, match=r"nsr\.attach"), nsr.disabled(nn.Linear(2, 2)):
        pass


def test_disabled_restores_also_after_an_error() -> None:
    model = host()

    def fail_inside() -> None:
        with nsr.disabled(model):
            assert not model["lost"].enabled
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail_inside()
    assert model["lost"].enabled
