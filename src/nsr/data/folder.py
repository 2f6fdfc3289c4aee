"""Where data lies, and how a file is read without trusting it."""

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np


def data_folder() -> Path:
    """``$NSR_DATA`` if set, else ``nsr`` in the user's cache folder."""
    named = os.environ.get("NSR_DATA")
    if named:
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nsr"


def read_npz(path: Path, keys: Iterable[str], remedy: str) -> dict[str, np.ndarray]:
    """The named arrays of an npz file, read without pickle.

    Args:
        path: The file.
        keys: The arrays it must hold.
        remedy: What to do where it is missing or damaged.

    Raises:
        ValueError: It is missing, not readable, damaged, or another kind of file.
    """
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            missing = [key for key in keys if key not in file]
            if missing:
                raise ValueError(f"{path} has no {', '.join(missing)}: it is not the expected file. {remedy}")
            return {key: file[key] for key in keys}
    except FileNotFoundError:
        raise ValueError(f"{path} is not there. {remedy}") from None
    except PermissionError:
        raise ValueError(f"{path} may not be read. Give this user the right to, or set NSR_DATA elsewhere.") from None
    except Exception as error:  # zip, compression and header each have errors of their own for a damaged file
        if isinstance(error, ValueError) and str(path) in str(error):
            raise
        raise ValueError(f"{path} is damaged, incomplete or no npz file ({error}). Delete it. {remedy}") from error
