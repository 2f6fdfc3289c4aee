"""What every test shares: a fixed seed, one thread's worth of noise, and the place of the real data."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

# Examples are drawn anew on every machine but the same way on each run; timing is no property under test.
settings.register_profile(
    "default", max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("default")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder with the real data sets; tests that use it carry the ``data`` marker."""
    folder = os.environ.get("NSR_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("real data is not at hand: set NSR_DATA to a folder in the cache layout")
    return Path(folder)
