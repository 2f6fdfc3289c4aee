"""A download against a real server: whole, resumed, damaged, refused."""

import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from nsr.data.download import fetch, file_hash

CONTENT = bytes(range(256)) * 40
HASH = hashlib.sha256(CONTENT).hexdigest()


class Server(BaseHTTPRequestHandler):
    """Serves CONTENT; `/cut` breaks off half way, `/plain` knows no ranges, `/gone` is not there."""

    asked: list[tuple[str, str | None]] = []

    def do_GET(self) -> None:
        wanted = self.headers.get("Range")
        self.asked.append((self.path, wanted))
        if self.path == "/gone":
            self.send_error(404)
            return
        begin = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and self.path != "/plain" else 0
        if begin >= len(CONTENT):
            self.send_error(416)
            return
        body = CONTENT[begin:]
        self.send_response(206 if begin else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if self.path == "/cut" else body)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    Server.asked = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_fetched_once(url: str, tmp_path: Path) -> None:
    seen: list[tuple[int, int | None]] = []
    target = tmp_path / "deep" / "file.npz"
    assert fetch(f"{url}/file", target, HASH, lambda have, total: seen.append((have, total))) == target
    assert target.read_bytes() == CONTENT
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    fetch(f"{url}/file", target, HASH)
    assert len(Server.asked) == 1
    assert [path.name for path in target.parent.iterdir()] == ["file.npz"]


def test_resumed_where_it_broke_off(url: str, tmp_path: Path) -> None:
    target, partial = tmp_path / "file", tmp_path / "file.partial"
    with pytest.raises(ValueError, match=r"5,120 bytes are kept"):
        fetch(f"{url}/cut", target, HASH)
    assert partial.read_bytes() == CONTENT[:5120]
    assert not target.exists()
    fetch(f"{url}/file", target, HASH)
    assert Server.asked[-1] == ("/file", "bytes=5120-")
    assert target.read_bytes() == CONTENT


@pytest.mark.parametrize("arrived", [100, len(CONTENT)])
def test_resumed_from_servers_of_all_kinds(url: str, tmp_path: Path, arrived: int) -> None:
    for path in ("plain", "file"):
        (tmp_path / f"{path}.partial").write_bytes(CONTENT[:arrived])
        assert fetch(f"{url}/{path}", tmp_path / path, HASH).read_bytes() == CONTENT


def test_another_file_is_not_accepted(url: str, tmp_path: Path) -> None:
    target = tmp_path / "file"
    (tmp_path / "file.partial").write_bytes(b"something else altogether")
    with pytest.raises(ValueError, match=f"expected {HASH}"):
        fetch(f"{url}/file", target, HASH)
    assert not list(tmp_path.iterdir())
    assert file_hash(fetch(f"{url}/file", target, HASH)) == HASH  # and the next attempt starts afresh


def test_a_damaged_copy_is_replaced(url: str, tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_bytes(CONTENT[:-1])
    assert fetch(f"{url}/file", target, HASH).read_bytes() == CONTENT


def test_an_unreachable_file_says_where_to_put_it(url: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"404.*put the file at .*file yourself"):
        fetch(f"{url}/gone", tmp_path / "file", HASH)


def test_other_hashes_and_none(url: str, tmp_path: Path) -> None:
    sha1 = hashlib.sha1(CONTENT).hexdigest()
    assert fetch(f"{url}/file", tmp_path / "a", sha1).read_bytes() == CONTENT
    with pytest.raises(ValueError, match=f"has the hash {sha1}, expected {'0' * 40}"):
        fetch(f"{url}/file", tmp_path / "b", "0" * 40)
    assert fetch(f"{url}/file", tmp_path / "c").read_bytes() == CONTENT
    fetch(f"{url}/gone", tmp_path / "c")  # it is there


def test_a_folder_that_may_not_be_written(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(ValueError, match=r"may not be written .* Set NSR_DATA"):
        fetch(f"{url}/file", tmp_path / "deep" / "file", HASH)
