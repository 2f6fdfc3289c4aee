"""Where data lies, how it gets there, and how a file is read without trusting it."""

import hashlib
import os
import urllib.error
import urllib.request
import zipfile
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
    except (zipfile.BadZipFile, EOFError, OSError) as error:
        raise ValueError(f"{path} is damaged or incomplete ({error}). Delete it. {remedy}") from error
    except ValueError as error:
        if str(path) in str(error):
            raise
        raise ValueError(f"{path} is damaged or no npz file ({error}). Delete it. {remedy}") from error


def sha256(path: Path) -> str:
    """Of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def download(url: str, path: Path, expected: str | None = None) -> None:
    """Fetch a file; it appears under ``path`` only once it is complete and, where known, its hash is right.

    Raises:
        ValueError: The source cannot be reached, the folder cannot be written, or the hash is another.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with urllib.request.urlopen(url, timeout=60) as source, partial.open("wb") as file:
            while block := source.read(1 << 20):
                file.write(block)
        found = sha256(partial)
        if expected is not None and found != expected:
            raise ValueError(f"{url} gave a file with sha256 {found}; expected {expected}. Nothing was kept.")
        os.replace(partial, path)
    except PermissionError:
        raise ValueError(f"{path.parent} may not be written. Set NSR_DATA to a folder that may.") from None
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        raise ValueError(f"{url} cannot be reached ({error}). Fetch it by other means and put it at {path}.") from error
    finally:
        if partial.parent.is_dir() and os.access(partial.parent, os.W_OK):
            partial.unlink(missing_ok=True)
