"""A file that is there as a whole or not at all, whatever ends the process that writes it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file to write; it takes the place of ``path`` when the block ends, and is gone if the block fails.

    Its bytes are on the disk before it is renamed, and the new name is before this returns: neither a killed process
    nor a lost machine leaves half a file under ``path``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        synchronise(partial)
        os.replace(partial, path)
        synchronise(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def synchronise(path: Path) -> None:
    """Until what was written to a file, or renamed in a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
