"""One process a run: who holds the lock of a result may make it, and a process that dies lets go of it."""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Taken(ValueError):
    """Another process is at this run."""


@contextmanager
def locked(result: Path) -> Iterator[None]:
    """Hold the lock of a result file, ``.<name>.lock`` beside it.

    The lock is the operating system's and ends with the process that holds it, however that ends: there is no stale
    lock to remove. The file says who holds it.

    Raises:
        Taken: Another process holds it; says which.
        ValueError: The file system has no locks.
    """
    path = result.with_name(f".{result.name}.lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = _acquire(path)
    try:
        os.truncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _acquire(path: Path) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is(path, descriptor):
                return descriptor
            os.close(descriptor)  # its holder finished, and removed the file, just before this one got it
        except BlockingIOError:
            holder = os.read(descriptor, 200).decode(errors="replace") or "another process"
            os.close(descriptor)
            raise Taken(f"{path.parent / path.name[1:-5]} is being made by {holder}; two must not.") from None
        except OSError as error:
            os.close(descriptor)
            raise ValueError(
                f"{path.parent} cannot be locked ({error}): its file system has no locks. Choose another --results."
            ) from error


def _is(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
