"""C++ that is compiled where it runs: once, whole or not at all, with a clear word where it cannot be."""

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nsr.kernels import native

ADAM = Path(native.__file__).parents[2] / "training" / "native" / "adam.cpp"
ANSWER = 'extern "C" int answer() { return ANSWER; }'


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if native.compiler() is None:
        pytest.skip("there is no C++ compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "answer.cpp"
    path.write_text(ANSWER)
    return path


def libraries(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache").rglob("*"), key=str)[2:]  # below nsr/native


def load(source: Path, definition: str) -> ctypes.CDLL:
    return native.compiled(source, (definition,))


def test_compiled_once(source: Path, tmp_path: Path) -> None:
    assert load(source, "ANSWER=42").answer() == 42
    (library,) = libraries(tmp_path)
    made = library.stat().st_mtime_ns
    assert load(source, "ANSWER=42").answer() == 42
    assert libraries(tmp_path) == [library]
    assert library.stat().st_mtime_ns == made


def test_another_definition_or_source_is_another_library(source: Path, tmp_path: Path) -> None:
    assert load(source, "ANSWER=1").answer() == 1
    assert load(source, "ANSWER=2").answer() == 2
    source.write_text(ANSWER.replace("ANSWER", "ANSWER + 1"))
    assert load(source, "ANSWER=2").answer() == 3
    assert len(libraries(tmp_path)) == 3


def test_a_refused_file_leaves_nothing_and_says_why(source: Path, tmp_path: Path) -> None:
    source.write_text("this is no C++")
    with pytest.raises(native.CannotCompileError, match=r"cannot compile .*answer\.cpp:\n(.|\n)*this"):
        load(source, "ANSWER=1")
    assert libraries(tmp_path) == []


def test_no_compiler(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert native.compiler() is None
    with pytest.raises(native.CannotCompileError, match="install g\\+\\+"):
        load(source, "ANSWER=1")


@pytest.fixture
def another_process() -> Iterator[None]:
    """One that has loaded nothing yet."""
    native.load_library.cache_clear()
    yield
    native.load_library.cache_clear()


def test_without_a_compiler_there_is_no_library(monkeypatch: pytest.MonkeyPatch, another_process: None) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert native.load_library(ADAM) is None


def test_a_compiler_that_refuses_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, another_process: None
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "false")  # it refuses everything
    with pytest.warns(UserWarning, match="cannot compile .*adam.cpp(.|\n)*Plain operators"):
        assert native.load_library(ADAM) is None


def test_a_cache_folder_that_cannot_be_used_is_warned_of(source: Path, tmp_path: Path, another_process: None) -> None:
    (tmp_path / "cache").touch()  # a file where the folder should be
    with pytest.warns(UserWarning, match=r"answer-.*\.so cannot be(.|\n)*XDG_CACHE_HOME(.|\n)*Plain operators"):
        assert native.load_library(source, ("ANSWER=5",)) is None


def test_what_a_file_includes_counts(source: Path, tmp_path: Path) -> None:
    (tmp_path / "answer.h").write_text("#define ANSWER 7")
    source.write_text('#include "answer.h"\n' + ANSWER)
    assert native.compiled(source).answer() == 7
    (tmp_path / "answer.h").write_text("#define ANSWER 8")
    assert native.compiled(source).answer() == 8


def test_denormal_numbers_stay_what_they_are(source: Path) -> None:
    small = torch.full((64,), 1e-40)
    assert load(source, "ANSWER=1").answer() == 1
    assert (small * 0.5 > 0).all()
