"""The token kernels equal their plain twins: on the CPU through Triton's interpreter, and on a GPU."""

import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nsr.kernels import tokens as kernels
from nsr.tokens import tome_plan

CHECKS = Path(__file__).with_name("token_checks.py")


GROUPS = [
    ("check_tome", "check_descending"),
    ("check_features", "check_pitome", "check_mpm"),
    (
        "check_merge",
        "check_merge_gradient",
        "check_residual_gradient",
        "check_spread",
        "check_unmerge",
        "check_restore",
    ),
    ("check_attention", "check_half_attention", "check_beside"),
    ("check_linear", "check_half_block", "check_stacked_branches"),
    ("check_tome_model", "check_pitome_model", "check_mpm_model", "check_traced_model"),
]


@pytest.mark.parametrize("names", GROUPS, ids="-".join)
def test_kernels_equal_their_plain_twins_under_the_interpreter(names: tuple[str, ...]) -> None:
    pytest.importorskip("triton")
    _finish(*_start("cpu", names))


def test_no_check_is_left_out() -> None:
    defined = re.findall(r"^def (check_\w+)", CHECKS.read_text(), re.MULTILINE)
    assert sorted(name for names in GROUPS for name in names) == sorted(defined)


@pytest.mark.gpu
def test_kernels_equal_their_plain_twins_on_a_gpu() -> None:
    """All at once: what takes time is compiling, on one core a check."""
    for started in [_start("cuda", (name,)) for names in GROUPS for name in names]:
        _finish(*started)


def _start(device: str, names: tuple[str, ...]) -> tuple[subprocess.Popen[str], tuple[str, ...], int]:
    seed = random.randrange(10_000)  # fresh inputs each time; the seed is in the message of a failure
    command = [sys.executable, "-W", "error", str(CHECKS), device, str(seed), *names]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True), names, seed


def _finish(process: subprocess.Popen[str], names: tuple[str, ...], seed: int) -> None:
    said, errors = process.communicate()
    assert process.returncode == 0, f"seed {seed}\n{said}\n{errors}"
    assert [line.split()[0] for line in said.splitlines()] == list(names)


def test_the_plain_code_is_the_choice_on_a_cpu() -> None:
    plan = tome_plan(torch.randn(1, 20, 8), 4)
    assert plan is not None
    assert plan.layout is None
    assert not kernels.use_kernels(torch.zeros(1))


def test_the_choice_can_be_forced_and_comes_back() -> None:
    with kernels.token_kernels(True):
        assert kernels.use_kernels(torch.zeros(1))
        with kernels.token_kernels(False):
            assert not kernels.use_kernels(torch.zeros(1))
        assert kernels.use_kernels(torch.zeros(1))
    assert not kernels.use_kernels(torch.zeros(1))


def test_operators_describe_their_outputs_to_the_compiler() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        metric = torch.empty(2, 21, 16, dtype=torch.bfloat16)
        group = kernels.tome_layout(metric.unsqueeze(1), None, 6, 1).group
        layout = kernels.lay_out(group, torch.empty(2, 21), 15)
        merged = kernels.merge(metric, layout)
        hidden = kernels.norm_linear(metric, *(torch.empty(16) for _ in "wb"), 1e-6, torch.empty(40, 16), metric, True)
        added = kernels.linear_add(metric, hidden, torch.empty(16, 40), metric)
        attended = kernels.attention(torch.empty(2, 21, 3, 4, 16), torch.empty(2, 21))
        restored = kernels.unmerge(merged, [layout], 1)
        codes = kernels.spread([torch.empty(2, 21, 8)], [layout], 1)
    assert group.shape == (2, 21)
    assert group.dtype == torch.int64
    assert [part.shape for part in layout[1:]] == [(2, 21), (2, 21), (2, 16), (2, 15), (2, 0), (2, 0), (2, 0)]
    assert merged.shape == (2, 15, 16)
    assert merged.dtype == torch.bfloat16
    assert hidden.shape == (2, 21, 40)
    assert added.shape == metric.shape
    assert attended.shape == (2, 21, 4, 16)
    assert restored.shape == (2, 20, 16)
    assert codes.shape == (2, 20, 8)
