"""Every code block in README.md and docs runs.

Python blocks of a page run from top to bottom in one session, in an empty folder. Shell blocks are ``nsr`` commands:
they run too, unless a comment right above the block says ``<!-- not run: why -->``; even then every command and option
in it must exist. Targets of ``make`` must exist.
"""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from nsr.cli import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"(?P<excuse><!-- not run: [^>]+ -->\s*\n)?^```(?P<kind>\w*)[^\n]*\n(?P<code>.*?)^```", re.M | re.S)


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    kind: str
    code: str
    excused: bool


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(page, text.count("\n", 0, m.start("code")) + 1, m["kind"], m["code"], m["excuse"] is not None)
        for m in FENCE.finditer(text)
    ]


def pages_with(kind: str) -> list[Path]:
    return [page for page in PAGES if any(block.kind == kind for block in blocks(page))]


@pytest.mark.parametrize("page", pages_with("python"), ids=lambda page: page.name)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    session: dict[str, object] = {"__name__": "session"}
    for block in blocks(page):
        if block.kind == "python":
            assert not block.excused, f"{page.name}:{block.line}: Python is always run"
            padding = "\n" * (block.line - 1)  # so that a traceback names the page's own line
            exec(compile(padding + block.code, page, "exec"), session)


@pytest.mark.parametrize("page", pages_with("sh"), ids=lambda page: page.name)
def test_shell_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").mkdir()  # as in the repository
    for block in blocks(page):
        if block.kind != "sh":
            continue
        for words in commands(block.code):
            where = f"{page.name}:{block.line}: {shlex.join(words)}"
            if words[0] == "nsr":
                check_options(words[1:], where)
            if words[0] == "make":
                assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.M), where
            elif not block.excused:
                assert words[0] == "nsr", f"{where}: say above the block why this is not run"
                done = CliRunner().invoke(app, words[1:])
                assert done.exit_code == 0, f"{where}\n{done.output}\n{done.exception}"


def commands(code: str) -> list[list[str]]:
    lines = code.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def check_options(words: list[str], where: str) -> None:
    """The command exists and knows every option given."""
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands"):
        assert words, f"{where}: a command is missing"
        assert words[0] in command.commands, f"{where}: there is no command {words[0]}"
        command, words = command.commands[words[0]], words[1:]
    known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
    if command.name == "sweep":  # hands on what nsr run takes
        passed_on = typer.main.get_command(app).commands["run"].commands[words[0]]  # type: ignore[attr-defined]
        known |= {option for parameter in passed_on.params for option in parameter.opts}
    for word in words:
        if word.startswith("--"):
            assert word.partition("=")[0] in known, f"{where}: there is no option {word}"


def test_only_these_kinds_of_blocks() -> None:
    """A block of another kind would be run by nobody; output and drawings have none."""
    for page in PAGES:
        for block in blocks(page):
            assert block.kind in ("python", "sh", "", "json", "bibtex"), f"{page.name}:{block.line}: {block.kind}"
