"""What a process really occupies while it works."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_STATUS = Path("/proc/self/status")


class Peak:
    """The most memory of this process so far, in bytes.

    Attributes:
        own: What it has allocated; this must fit into the machine's memory.
        mapped: Pages of files that it maps; the system takes them back when memory is short.
    """

    own: int = 0
    mapped: int = 0

    def look(self) -> None:
        """Take note of what it is now."""
        fields = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines() if ":" in line)
        own, mapped = (1024 * int(fields[name].split()[0]) for name in ("RssAnon", "RssFile"))
        self.own, self.mapped = max(self.own, own), max(self.mapped, mapped)


@contextmanager
def peak_memory(every: float = 0.1) -> Iterator[Peak]:
    """Look at this process every so many seconds while the block runs.

    Raises:
        ValueError: The system does not tell (it is not Linux).
    """
    if not _STATUS.is_file():
        raise ValueError(f"The memory of a process is read from {_STATUS}, which only Linux has.")
    peak, over = Peak(), threading.Event()

    def watch() -> None:
        while not over.wait(every):
            peak.look()

    watcher = threading.Thread(target=watch, daemon=True)
    peak.look()
    watcher.start()
    try:
        yield peak
    finally:
        over.set()
        watcher.join()
        peak.look()
