"""Fetch a file once: resumed where it broke off, checked by its hash, and in place only when it is whole."""

import hashlib
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

_PIECE = 2**20


def fetch(
    url: str, target: Path, digest: str | None = None, watch: Callable[[int, int | None], None] | None = None
) -> Path:
    """Download ``url`` to ``target`` unless it is there already, with this hash where one is known.

    What has arrived stays beside the target as ``<name>.partial`` when a download breaks off; the next call asks the
    server for the rest.

    Args:
        url: ``https://``, or ``http://`` for a mirror of one's own.
        target: Where the file goes.
        digest: Its published sha256 or sha1 in hex; ``None`` where none is published, and then its reader has to check
            what is in it.
        watch: Told how many bytes have arrived, and of how many if the server says so.

    Returns:
        ``target``.

    Raises:
        ValueError: The server cannot be reached, the folder cannot be written, or the file is not the one expected;
            says what to do.
    """
    if target.is_file() and digest in (None, file_hash(target, digest)):
        return target
    partial = target.with_name(f"{target.name}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _download(url, partial, watch)
    except PermissionError as error:
        raise ValueError(f"{target.parent} may not be written ({error}). Set NSR_DATA to a folder that may.") from error
    except (urllib.error.URLError, OSError) as error:
        kept = partial.stat().st_size if partial.is_file() else 0
        raise ValueError(
            f"{url} could not be fetched ({error}); {kept:,} bytes are kept in {partial}. Try again to go on from "
            f"there, or put the file at {target} yourself."
        ) from error
    found = file_hash(partial, digest)
    if digest not in (None, found):
        partial.unlink()  # a resumed download of a file that has changed meanwhile: only a fresh start helps
        raise ValueError(
            f"What {url} gave has the hash {found}, expected {digest}: the download was damaged or the file has "
            "changed. It was removed; try again."
        )
    os.replace(partial, target)
    return target


def file_hash(path: Path, like: str | None = None) -> str:
    """The sha256 of a file in hex, or its sha1 where ``like`` is as long as one."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha1" if like is not None and len(like) == 40 else "sha256").hexdigest()


def _download(url: str, partial: Path, watch: Callable[[int, int | None], None] | None) -> None:
    have = partial.stat().st_size if partial.is_file() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        response = urllib.request.urlopen(request, timeout=60)
    except urllib.error.HTTPError as error:
        if error.code == 416 and have:  # nothing is left to send: the hash decides whether that is the file
            return
        raise
    with response:
        resumed = response.status == 206  # a server that does not know ranges sends the whole file
        have = have if resumed else 0
        length = response.headers.get("Content-Length")
        total = have + int(length) if length else None
        with partial.open("ab" if resumed else "wb") as file:
            while piece := response.read(_PIECE):
                file.write(piece)
                have += len(piece)
                if watch is not None:
                    watch(have, total)
        if total is not None and have < total:
            raise OSError(f"the connection was lost after {have:,} of {total:,} bytes")
