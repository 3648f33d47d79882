"""The code of the pages: Python runs as it stands, commands are real, and the quick ones run.

A block marked ``python`` is run, after those before it on its page; one marked ``py`` is shown
alone, since it needs a GPU, a model or a file. Of the blocks ``console`` every command runs, of
``sh`` the quick ones; all of this package are parsed, with their options, and Makefile's targets
are looked up.
"""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import numpy as np
import pytest

from checkout import ROOT
from gemmule_lab import cli
from site_pages import PAGES, blocks, name_of, prose

ELSEWHERE = {  # pages whose Python other tests run, and where
    "docs/distributed.md": "tests/dtensor_checks.py, on several processes",
    "CONTRIBUTING.md": "it is a rung's declaration, which is not a program",
}
WITH_PYTHON = [page for page in PAGES if blocks(page, "python") and name_of(page) not in ELSEWHERE]
WITH_COMMANDS = [page for page in PAGES if blocks(page, "sh", "console")]
of_pages = {"ids": name_of}


@pytest.mark.parametrize("page", WITH_PYTHON, **of_pages)
def test_the_python_of_a_page_runs(page: Path, elsewhere: Path) -> None:
    names: dict[str, object] = {"__name__": "__page__"}
    for number, block in enumerate(blocks(page, "python"), 1):
        exec(compile(block, f"{name_of(page)}, block {number}", "exec"), names)


@pytest.mark.parametrize("page", PAGES, **of_pages)
def test_python_that_is_shown_can_be_parsed(page: Path) -> None:
    for block in blocks(page, "py"):
        ast.parse(block)


def test_the_pages_with_code_are_seen() -> None:
    assert {"README.md", "docs/start.md", "docs/course.md"} <= {name_of(p) for p in WITH_PYTHON}
    assert {"README.md", "docs/start.md", "docs/commands.md"} <= {name_of(p) for p in WITH_COMMANDS}


def commands(page: Path, language: str) -> list[list[str]]:
    """Return the words of every command of a page; comments and prompts are left out."""
    found = []
    for block in blocks(page, language):
        for line in block.replace("\\\n", " ").splitlines():
            if language == "console" and not line.startswith("$ "):
                continue  # what a command answers
            words = shlex.split(line.removeprefix("$ "), comments=True)
            if words:
                found.append(words)
    return found


def inline(page: Path) -> list[list[str]]:
    """Return the words after ``gemmule`` of every command that a page names within its text.

    (What the changelog names, some release had.)
    """
    found = [shlex.split(code) for code in re.findall(r"`gemmule ([a-z][^`]+)`", prose(page))]
    return [words for words in found if "..." not in words and page.stem != "CHANGELOG"]


def parse(words: list[str]) -> None:
    """Let click read a command of this package, with its options; nothing runs."""
    group, context = cli.cli, click.Context(cli.cli, info_name="gemmule")
    if words in (["--help"], ["--version"]):
        return
    name, command, rest = group.resolve_command(context, words)
    assert command is not None, name
    command.make_context(name, rest, parent=context)


@pytest.mark.parametrize("page", WITH_COMMANDS, **of_pages)
def test_the_commands_of_a_page_are_real(page: Path, elsewhere: Path) -> None:
    for name in ("A.npy", "x.npy", "model.safetensors", "results.jsonl"):
        (elsewhere / name).touch()
    for folder in ("IN", "Llama-3.1-8B", "Llama-int4"):
        (elsewhere / folder).mkdir()
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for words in [*commands(page, "sh"), *commands(page, "console")]:
        if words[0] == "gemmule":
            parse(["results.jsonl" if "*" in word else word for word in words[1:]])
        elif words[0] == "make":
            assert re.search(rf"^{words[1]}:|[ ]{words[1]}[ :]", makefile, re.MULTILINE), words
        elif words[:1] == ["python"] and words[1].endswith(".py"):
            assert (ROOT / words[1]).is_file(), words


@pytest.mark.parametrize("page", [page for page in PAGES if inline(page)], **of_pages)
def test_the_options_of_commands_in_the_text_exist(page: Path) -> None:
    for words in inline(page):
        group, context = cli.cli, click.Context(cli.cli, info_name="gemmule")
        _, command, rest = group.resolve_command(context, words)
        assert command is not None
        known = {"--help"}.union(*(one.opts + one.secondary_opts for one in command.params))
        assert {word for word in rest if word.startswith("--")} <= known, words


def quick(page: Path) -> list[list[str]]:
    """Return the commands of a page that take seconds: all of ``console``, some of ``sh``."""
    shown = [words for words in commands(page, "sh") if words[0] == "gemmule"]
    read = [words for words in shown if words[1] in ("doctor", "ladder", "multiply")]
    return [*read, *(words for words in shown if "--show" in words), *commands(page, "console")]


@pytest.mark.parametrize("page", [page for page in PAGES if quick(page)], **of_pages)
def test_quick_commands_run(page: Path, elsewhere: Path, tree: dict[str, str]) -> None:
    np.save("A.npy", np.ones((3, 2), np.float32))
    np.save("x.npy", np.ones(2, np.float32))
    for words in quick(page):
        assert words[0] in ("gemmule", "python"), f"{words[0]}: mark what is not run as sh"
        arguments = ["-m", *words] if words[0] == "gemmule" else words[1:]
        run = [sys.executable, *arguments]
        done = subprocess.run(run, env=tree, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize(
    "words", [["multiplied", "A.npy"], ["doctor", "--nonsense"], ["tune", "--op", "other"]]
)
def test_other_commands_would_be_seen(words: list[str]) -> None:
    with pytest.raises(click.ClickException):
        parse(words)
