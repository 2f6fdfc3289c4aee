import json

from typer.testing import CliRunner

from nsr.cli import app


def test_tree_prints_the_golden_hashes() -> None:
    result = CliRunner().invoke(app, ["data", "tree", "--depth", "4", "--seed", "11", "--json"])
    assert result.exit_code == 0
    facts = json.loads(result.stdout)
    assert facts["permutations"] == 1000
    assert facts["first_values"] == [9, 4, 7, 11, 16, 5, 6, 15]
    assert facts["sha256"] == {
        "permutations": "85685f038cd038de",
        "train": "4687cb2d776d58a1",
        "test": "53a7d1a3c3ea84d1",
    }
