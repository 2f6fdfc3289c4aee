"""The token examples run and show what they say."""

import re
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def shares(name, capsys):
    """The percentages that an example prints of its accuracies, in order."""
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return [float(share) for share in re.findall(r"(\d+\.\d)%", capsys.readouterr().out)]


@pytest.mark.slow
def test_merge_and_segment(capsys):
    full, merged, with_nsr, switched_off = shares("merge_and_segment.py", capsys)
    assert with_nsr > merged + 5
    assert full > merged + 5
    assert switched_off < with_nsr - 5


def test_adapter_training(capsys):
    full, merged, adapted, switched_off = shares("adapter_training.py", capsys)
    assert full > merged + 5
    assert adapted > merged + 5
    assert switched_off < adapted - 5
