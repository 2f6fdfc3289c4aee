"""Results to report on: near the paper's numbers, none at all, and hostile ones."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def _example_module() -> ModuleType:
    """``example_results.py`` beside this file, which pytest's importlib mode does not put on the path."""
    spec = importlib.util.spec_from_file_location("example_results", Path(__file__).with_name("example_results.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["example_results"] = module
    spec.loader.exec_module(module)
    return module


example = _example_module()


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read only: a whole tree of results."""
    folder = tmp_path_factory.mktemp("example") / "results"
    example.write_example(folder)
    return folder


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    folder = tmp_path / "results"
    folder.mkdir()
    return folder
