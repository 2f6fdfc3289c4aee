"""Every example in a docstring runs."""

import doctest
import importlib
import pkgutil

import pytest

import nsr

MODULES = [name for _, name, _ in pkgutil.walk_packages(nsr.__path__, "nsr.") if not name.endswith("__main__")]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name: str) -> None:
    module = importlib.import_module(name)
    failed, _ = doctest.testmod(module, extraglobs={"nsr": nsr}, optionflags=doctest.ELLIPSIS)
    assert failed == 0
