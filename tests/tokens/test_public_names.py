"""The public names of ``nsr.tokens``."""

import subprocess
import sys


def test_a_name_is_the_same_each_time() -> None:
    """A lazy name that is also a submodule's is the function once and the module ever after."""
    program = """
import nsr.tokens as tokens
first = {name: getattr(tokens, name) for name in tokens.__all__}
assert all(getattr(tokens, name) is first[name] for name in first), "changed"
assert callable(tokens.optimize)
"""
    subprocess.run([sys.executable, "-c", program], check=True)
