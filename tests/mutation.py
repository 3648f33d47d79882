"""A standing mutation run: faults are planted one by one, and the tests that should see each run.

``python tests/mutation.py [--seed S] [--mechanical N] [--faults N] [PATTERN ...]`` copies the
sources and the tests to a scratch folder, plants a fault there, and runs the tests which watch that
file, in a forked child with a time limit. A fault is *killed* by a failing test or by the limit;
others *survive*, but for those that are known to change nothing. Half of the faults are written by
hand; the others are made mechanically: an operator, a constant, a comparison, a statement, a guard,
a part of a condition, an option handed on, a new axis or a variable of a random place, by the seed.
``mutants/faults.toml`` holds the first half, some with the tests that kill them, the files that the
second is drawn from, the tests that watch a file, and the faults that change nothing, with reasons.
A file of which it says nothing is watched by the tests that import it, or what imports it. What
survives the tests that watch it meets those that import its module, the nearest first.

What failed runs once more on the sound sources, many tests at a time. One that fails there too, for
what this machine lacks, is told and killed nothing: its faults are tried without it. On more cores
than two each two jobs share a pair of them, as the tests do in a run of their own.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import fnmatch
import functools
import importlib
import itertools
import json
import os
import random
import re
import secrets
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from campaign_record import FILE, keep
from checkout import ROOT

FAULTS = tomllib.loads((ROOT / "tests" / "mutants" / "faults.toml").read_text(encoding="utf-8"))
EQUIVALENT = {one["fault"]: one["reason"] for one in FAULTS.get("equivalent", ())}
SOURCES = ROOT / "src", ROOT / "tools"  # where modules are named from
LIMIT_S = 240  # of one test
WIDER = 16  # files of tests beyond those that watch a fault
# Generators of public calls, which name no module: they look at what the others let through.
GENERATORS = (
    "tests/calls/test_shared_memory.py",
    "tests/calls/test_strange_operands.py",
    "tests/process/test_corners.py",
)
ELSEWHERE = "tests/pages/", "tests/models/", "tests/gpu/"  # what `make test` leaves out, or skips
EXAMPLES = "tests/repository/test_docstrings.py::test_examples_in_docstrings_give_what_they_say"
TOGETHER = 20  # killed faults whose tests run without them in one process
# What nobody imports, as it is found by its name, and the tests that go through all of it.
BY_NAME = {
    "gemmule.rungs.": "tests/rungs/test_ladder.py",
    "gemmule_lab.commands.": "tests/lab/test_cli.py",
}
NONE_RAN = "killed (ended with 5)"
GRACE_S = 45  # after the last fault was planted, where that has a time
SWAPS = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "+": "-", "-": "+",
    "*": "+", "//": "*", "%": "+", "and": "or", "or": "and", "not": "", "&&": "||", "||": "&&",
    "True": "False", "False": "True", "true": "false", "false": "true", "min": "max", "max": "min",
    "is": "is not", "in": "not in", "&": "|", "|": "&", "<<": ">>", ">>": "<<",
}  # fmt: skip
TOKEN = re.compile(
    r"\+\+|--|->|\*\*|[-+*/|&%]=|(?<![\w.])\d+(?![\w.])|<<|>>|<=|>=|==|!=|//|&&|\|\||[-+*%<>&|]"
    r"|\b(?:and|or|not|True|False|true|false|min|max|is|in)\b"
)


@dataclass(frozen=True)
class Fault:
    """One change of one file: the text at `start` is replaced."""

    path: str
    start: int
    old: str
    new: str
    kind: str
    tests: tuple[str, ...] = ()  # pytest's arguments, where the fault has its own

    def apply(self, text: str) -> str:
        """Return the file's text with the fault in it."""
        assert text[self.start : self.start + len(self.old)] == self.old
        return text[: self.start] + self.new + text[self.start + len(self.old) :]

    def __str__(self) -> str:
        text = (ROOT / self.path).read_text()
        line = text.count("\n", 0, self.start)
        before = text.splitlines()[line].strip()
        after = self.apply(text).splitlines()[line].strip()
        return f"{self.path}:{line + 1} [{before}] -> [{after}]"


def by_hand() -> Iterator[Fault]:
    """Yield the listed faults that fit their files; `outdated` has the others."""
    for listed in FAULTS["by_hand"]:
        text = (ROOT / listed["file"]).read_text()
        if text.count(listed["old"]) == 1:
            place = text.index(listed["old"])
            own = tuple(listed.get("tests", ()))
            yield Fault(listed["file"], place, listed["old"], listed["new"], "by hand", own)


def outdated() -> list[str]:
    """Return the listed faults whose text their file does not hold exactly once any more."""
    return [
        f"{one['file']}: {one['old']!r}"
        for one in FAULTS["by_hand"]
        if (ROOT / one["file"]).read_text().count(one["old"]) != 1
    ]


def mechanical(count: int, seed: int) -> Iterator[Fault]:
    """Yield faults of random places of the files in ``drawn_from``, by turns."""
    rng = random.Random(seed)
    seen: set[tuple[str, int]] = set()
    files = sorted({str(p.relative_to(ROOT)) for g in FAULTS["drawn_from"] for p in ROOT.glob(g)})
    rng.shuffle(files)
    turn = 0
    while len(seen) < count:
        path = files[turn % len(files)]
        turn += 1
        fault = _drawn(path, rng)
        if fault is not None and (path, fault.start) not in seen:
            seen.add((path, fault.start))
            yield fault


def _drawn(path: str, rng: random.Random) -> Fault | None:
    """Return a fault of a random place of a file, None where the place gives none."""
    text = (ROOT / path).read_text()
    kinds = tokens_of, statements_of, guards_of, new_axes_of, conditions_of, keywords_of, names_of
    (kinds_of,) = rng.choices(kinds, (45, 15, 10, 5, 10, 5, 10))
    places = list(kinds_of(path, text)) or list(tokens_of(path, text))
    if not places:
        return None
    start, old, new, kind = rng.choice(places)
    fault = Fault(path, start, old, new, kind)
    if path.endswith(".py"):
        if any(first <= start < last for first, last in _annotations(text)):
            return None
        try:
            ast.parse(fault.apply(text))
        except SyntaxError:
            return None
    return fault


def tokens_of(path: str, text: str) -> Iterator[tuple[int, str, str, str]]:
    """Yield operators, comparisons and constants of the code, and what each becomes."""
    code = _without_words(path, text)
    types = _annotations(text) if path.endswith(".py") else []
    for match in TOKEN.finditer(code):
        old = match.group()
        if not old.isdigit() and old not in SWAPS:
            continue
        if any(first <= match.start() < last for first, last in types):
            continue
        # What holds, what is kept, and how much memory an object takes.
        if code[: match.start()].endswith(("strict=", "maxsize=", "slots=")):
            continue
        line = code[code.rfind("\n", 0, match.start()) + 1 : match.start()]
        if line.lstrip().startswith(("#", "import ", "from ", "template", "typedef", "class ")):
            continue
        if old.isdigit():
            yield match.start(), old, str(int(old) + 1), "constant"
        elif old in ("<", ">", "*", "&") and path.endswith((".cu", ".cuh", ".h")):
            around = code[match.start() - 1], code[match.end()]
            if around == (" ", " "):  # else a template, a pointer or a reference
                yield match.start(), old, SWAPS[old], "operator"
        else:
            yield match.start(), old, SWAPS[old], "operator"


def _annotations(text: str) -> list[tuple[int, int]]:
    """Return where types of arguments, results and variables stand: nothing computes with them."""
    found: list[ast.expr | None] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.arg | ast.AnnAssign):
            found.append(node.annotation)
        elif isinstance(node, ast.FunctionDef):
            found.append(node.returns)
    return [_span(text, node) for node in found if node is not None]


def _span(text: str, node: ast.expr | ast.stmt) -> tuple[int, int]:
    """Return the places of a node's first character and of the one behind it; ASCII is assumed."""
    lines = text.splitlines(keepends=True)
    starts = list(itertools.accumulate(map(len, lines), initial=0))
    last = starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
    return starts[node.lineno - 1] + node.col_offset, last


def _without_words(path: str, text: str) -> str:
    """Return the text with its comments and strings blanked out, as long as before."""

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match.group())

    if not path.endswith(".py"):
        # Launch bounds are a promise to the compiler, which no result depends on.
        bounds = r"__launch_bounds__\((?:[^()]|\([^()]*\))*\)"
        text = re.sub(rf"//[^\n]*|\"[^\"\n]*\"|{bounds}", blank, text)
        # Nor on what is fetched ahead, on the order of loads, on when the next grid may begin.
        loops = r"(?:^ *for \([^\n]*\)\n(?: *\n|#pragma[^\n]*\n)*)*"
        hints = r"ptx::(?:prefetch_l2|pin|pdl_launch_dependents)\("
        return re.sub(rf"{loops}^[^{{}}\n]*{hints}[^\n]*", blank, text, flags=re.M)
    text = re.sub(r'"""(?s:.*?)"""', blank, text)
    return re.sub(r"#[^\n]*|[rf]*\"[^\"\n]*\"", blank, text)


def statements_of(path: str, text: str) -> Iterator[tuple[int, str, str, str]]:
    """Yield whole statements of one line, and what leaves them out."""
    if not path.endswith(".py"):
        code = _without_words(path, text)
        for match in re.finditer(
            r"^ ++(?!return|typedef|using|static_assert)[\w:<> ]+\([^;{}\n]*\);", code, re.M
        ):
            yield match.start(), text[match.start() : match.end()], " ;", "statement"
        return
    kinds = (ast.Assign, ast.AugAssign, ast.Expr, ast.Raise, ast.Return)
    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in ast.walk(function):
            if not isinstance(node, kinds) or node.lineno != node.end_lineno:
                continue
            if isinstance(node, ast.Expr) and not isinstance(node.value, ast.Call):
                continue
            if node is function.body[-1] and ast.unparse(node) in ("return", "return None"):
                continue  # a function ends so without it
            start, end = _span(text, node)
            yield start, text[start:end], "pass", "statement"


def guards_of(path: str, text: str) -> Iterator[tuple[int, str, str, str]]:
    """Yield the conditions under which a function ends early, a loop goes on, or an error is told.

    They become false: what they keep out goes on.
    """
    if not path.endswith(".py"):
        code = _without_words(path, text)
        for match in re.finditer(r"\bif \([^;{}\n]*\) (?:return\b[^;\n]*|continue|break);", code):
            yield match.start(), text[match.start() : match.end()], ";", "guard"
        return
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.If) or node.orelse or len(node.body) != 1:
            continue
        if isinstance(node.body[0], ast.Raise | ast.Return | ast.Continue | ast.Break):
            start, end = _span(text, node.test)
            yield start, text[start:end], "False", "guard"


def new_axes_of(path: str, text: str) -> Iterator[tuple[int, str, str, str]]:
    """Yield indices that give an array a new axis, and the same with the axis one place aside."""
    if not path.endswith(".py"):
        return
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Subscript) or not isinstance(node.slice, ast.Tuple):
            continue
        parts = [ast.unparse(part) for part in node.slice.elts]
        for i in [i for i, part in enumerate(parts) if part == "None"]:
            other = i - 1 if i else 1
            if parts[other] != "None":
                moved = list(parts)
                moved[i], moved[other] = parts[other], parts[i]
                start, end = _span(text, node.slice)
                yield start, text[start:end], ", ".join(moved), "new axis"


def conditions_of(path: str, text: str) -> Iterator[tuple[int, str, str, str]]:
    """Yield conditions of several parts, and the same without one part."""
    if not path.endswith(".py"):
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Compare) and len(node.ops) > 1:  # low <= x <= high, less an end
            start, end = _span(text, node)
            first, last = _span(text, node.comparators[0]), _span(text, node.comparators[-2])
            yield start, text[start:end], text[first[0] : end], "condition"
            yield start, text[start:end], text[start : last[1]], "condition"
        if isinstance(node, ast.BoolOp):
            between = " and " if isinstance(node.op, ast.And) else " or "
            start, end = _span(text, node)
            parts = [text[slice(*_span(text, part))] for part in node.values]
            if "\n" not in text[start:end] and text[start:end] == between.join(parts):
                for i in range(len(parts)):
                    left = between.join([*parts[:i], *parts[i + 1 :]])
                    yield start, text[start:end], left, "condition"


def keywords_of(path: str, text: str) -> Iterator[tuple[int, str, str, str]]:
    """Yield keywords that hand an option of the same name on, and calls without them."""
    if path.endswith(".py"):
        for match in re.finditer(r", (\w+)=\1(?=[,)])", _without_words(path, text)):
            yield match.start(), match.group(), "", "keyword"


def names_of(path: str, text: str) -> Iterator[tuple[int, str, str, str]]:
    """Yield variables, and others of the same statement that could be meant."""
    if not path.endswith(".py"):
        return
    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, ast.FunctionDef):
            continue
        own = {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}
        named = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
        own |= {node.id for node in named if isinstance(node.ctx, ast.Store)}
        lines: dict[int, list[ast.Name]] = {}
        for node in named:
            if node.id in own and isinstance(node.ctx, ast.Load):
                lines.setdefault(node.lineno, []).append(node)
        for some in lines.values():
            for node, other in itertools.product(some, sorted({one.id for one in some})):
                if node.id != other:
                    yield _span(text, node)[0], node.id, other, "name"


def watching(fault: Fault) -> list[str]:
    """Return pytest's arguments for the tests that should see a fault."""
    if fault.tests:
        return list(fault.tests)
    for watch in FAULTS["watched"]:
        if fnmatch.fnmatch(fault.path, watch["files"]):
            tests = [a.format(stem=Path(fault.path).stem) for a in watch["tests"]]
            return tests if "-k" in tests else list(dict.fromkeys([*_named(fault.path), *tests]))
    return importing(fault.path)


def _named(path: str) -> list[str]:
    """Return the files of tests that are named after a module and import it."""
    source = ROOT / path
    files = sorted((ROOT / "tests").rglob(f"test_{source.stem}.py"))
    found = [one for one in files if path.startswith("src/") and _module(source) in _imported(one)]
    return [str(one.relative_to(ROOT)) for one in found]


@functools.cache
def importing(path: str) -> list[str]:
    """Return the files of tests that import a module; else those that import what imports it."""
    for found in _levels(path):
        return found
    raise ValueError(f"no test imports {path}; name its tests in a [[watched]] of faults.toml.")


def _levels(path: str) -> Iterator[list[str]]:
    """Yield the files of tests that import a module, then of what imports it, and so on."""
    tests = sorted(set((ROOT / "tests").rglob("test_*.py")) - {ROOT / EXAMPLES.split("::")[0]})
    sources = sorted(one for folder in SOURCES for one in folder.rglob("*.py"))
    wanted, seen = {_module(ROOT / path)}, set[str]()
    while wanted:
        found = [str(one.relative_to(ROOT)) for one in tests if _imported(one) & wanted]
        if not found:
            named = (of for at, of in BY_NAME.items() if any(one.startswith(at) for one in wanted))
            found = list(itertools.islice(named, 1))
        if found:
            yield found
        seen |= wanted
        wanted = {_module(one) for one in sources if _imported(one) & wanted} - seen
        if not wanted:  # a package that finds it by its name
            wanted = {_module(ROOT / path).rpartition(".")[0]} - seen - {"gemmule", "gemmule_lab"}


def wider(fault: Fault) -> list[str]:
    """Return pytest's arguments for what looks at a fault that those that watch it let through.

    Its room's tests, or the files that import the module, or what imports it: those which import
    least besides. Examples of its docstrings come before them.
    """
    if fault.tests or not fault.path.endswith(".py") or not fault.path.startswith("src/"):
        return []
    for room in FAULTS["rooms"]:
        if fnmatch.fnmatch(fault.path, room["files"]):
            tests = [a.format(stem=Path(fault.path).stem) for a in room["tests"]]
            return tests if "-k" in tests else list(dict.fromkeys([*tests, *GENERATORS]))
    watched = watching(fault)
    seen = () if "-k" in watched else watched
    near: dict[str, None] = {}
    if "    >>> " in (ROOT / fault.path).read_text():
        near[f"{EXAMPLES}[{_module(ROOT / fault.path)}]"] = None
    for level in itertools.islice(_levels(fault.path), 2):
        near |= dict.fromkeys(sorted(level, key=lambda one: len(_imported(ROOT / one))))
    near = dict.fromkeys([one for one in near if not one.startswith(ELSEWHERE)][:WIDER])
    return [one for one in (near | dict.fromkeys(GENERATORS)) if one not in seen]


def _module(source: Path) -> str:
    named = source.with_suffix("") if source.suffix == ".py" else source
    (folder,) = (one for one in SOURCES if source.is_relative_to(one))
    return ".".join(named.relative_to(folder).parts).removesuffix(".__init__")


@functools.cache
def _imported(source: Path) -> frozenset[str]:
    """Return the names that a file imports, or mentions with dots, as code for a child has them."""
    text, names = source.read_text(), set[str]()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{one.name}" for one in node.names)}
    return frozenset(names | set(re.findall(r"\bgemmule(?:_lab)?(?:\.\w+)+", text)))


def scratch(folder: Path) -> Path:
    """Copy what the tests need into a folder and return it."""
    kept = shutil.ignore_patterns("__pycache__", "*.pyc")
    for name in ("src", "tests", "evidence", "docs", "tools", "examples"):
        shutil.copytree(ROOT / name, folder / name, ignore=kept, symlinks=True)
    for name in ("pyproject.toml", "README.md", "Makefile"):
        shutil.copy(ROOT / name, folder / name)
    return folder


class Child:
    """One fault in one scratch folder, or none, and the process whose tests look at it."""

    def __init__(self, fault: Fault | None, arguments: list[str], folder: Path) -> None:
        self.fault, self.folder, self.arguments = fault, folder, arguments
        self.began = time.monotonic()
        if (folder / "cache").is_symlink():
            (folder / "cache").unlink()
        shutil.rmtree(folder / "cache", ignore_errors=True)
        warm = folder.parent / "cache" / "kernels"  # compiled from the sound sources
        if fault is None:
            (folder / "cache").symlink_to(folder.parent / "cache")
        elif warm.is_dir():  # a copy of its own: a fault may compile nonsense
            shutil.copytree(warm, folder / "cache" / "kernels", copy_function=os.link)
        self.target = None if fault is None else folder / fault.path
        if fault is not None and self.target is not None:
            self.sound = self.target.read_text()
            self.target.write_text(fault.apply(self.sound))
        (folder / "failed").write_text("")
        (folder / "at").write_text("")
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _tests(folder, arguments, stop=fault is not None)
            finally:  # what a test let through, also in a process that it forked: all ends here
                os._exit(70)

    def ended(self) -> str:
        """Return what happened and take the fault out, or an empty text while tests run."""
        found, status, used = os.wait4(self.pid, os.WNOHANG)
        self.processor_s = used.ru_utime + used.ru_stime
        if not found:
            late = time.time() - (self.folder / "at").stat().st_mtime > LIMIT_S
            if late:
                self.stopped()
            return "killed (time)" if late else ""
        self._take_out()
        code = os.waitstatus_to_exitcode(status)
        said = (self.folder / "said").read_text(errors="replace")
        if self.fault and code == 1 and "BuildError" in said:
            return "does not compile"
        return {0: "survived", 1: "killed"}.get(code, f"killed (ended with {code})")

    def stopped(self) -> Path:
        """End the tests that run, take the fault out and return the folder."""
        os.killpg(self.pid, signal.SIGKILL)
        used = os.wait4(self.pid, 0)[2]
        self.processor_s = used.ru_utime + used.ru_stime
        self._take_out()
        return self.folder

    def _take_out(self) -> None:
        if self.target is not None:
            self.target.write_text(self.sound)

    def failed(self) -> tuple[str, ...]:
        """Return the tests that failed, and the files that could not be read.

        Else the test that ran when all ended; or nothing, where none had begun.
        """
        told = (self.folder / "failed").read_text() or (self.folder / "at").read_text()
        return tuple(dict.fromkeys(told.splitlines()))


class Told:
    """A plugin of pytest that writes down which test runs, and which tests and files failed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Write down the test that begins; when it was written is when it began."""
        (self.folder / "at").write_text(nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Add a test that failed."""
        if report.failed:
            with (self.folder / "failed").open("a") as file:
                print(report.nodeid, file=file)

    pytest_collectreport = pytest_runtest_logreport


def _tests(folder: Path, arguments: list[str], stop: bool) -> None:
    """Become a process that runs tests of the scratch folder and nothing else.

    stop: at the first test that fails.
    """
    os.setsid()
    cores = sorted(os.sched_getaffinity(0))
    pair = int(folder.name) // 2 * 2 % len(cores)
    os.sched_setaffinity(0, cores[pair : pair + 2])
    said = os.open(folder / "said", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(said, stream)
    os.chdir(folder)
    paths = [str(folder / "src"), str(folder / "tests"), str(folder / "tools")]
    own = str(ROOT / "tests")
    sys.path[:] = [*paths, *(p for p in sys.path if p not in (own, str(ROOT / "src")))]
    os.environ["GEMMULE_CACHE"] = str(folder / "cache")
    os.environ["XDG_CACHE_HOME"] = str(folder.parent)  # the emulator's keys hold all sources
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    own_modules = ("gemmule", "campaign_record", "checkout")
    for name in [n for n in sys.modules if n.split(".")[0] in own_modules]:
        del sys.modules[name]
    pytest = importlib.import_module("pytest")
    options = ["-q", "-p", "no:cacheprovider", "--no-header", "-m", "not soak"]
    options += ["-x"] if stop else []
    os._exit(int(pytest.main([*options, *arguments], plugins=[Told(folder)])))


class Trial:
    """A fault on its way to what is said of it."""

    def __init__(self, fault: Fault) -> None:
        self.fault, self.arguments = fault, tuple(watching(fault))
        self.wider = tuple(wider(fault))  # which look at it where those let it through
        self.check: tuple[str, ...] = ()  # pytest's arguments for what must pass without the fault
        self.alone = False  # it is checked in a process of its own

    def less(self, without: Collection[str]) -> list[str]:
        """Return pytest's arguments less some tests and less files that cannot be read."""
        left = [one for one in self.arguments if one.split("::")[0] not in without]
        return [*left, *(f"--deselect={one}" for one in without if "::" in one)]


class Run:
    """Faults on trial: what the tests said of them, and of the sound sources."""

    def __init__(self, faults: list[Fault], judged: Path | None = None) -> None:
        self.judged = judged  # where verdicts are kept for a later run
        known = dict(map(json.loads, judged.read_text().splitlines())) if judged else {}
        self.found = [(fault, known[str(fault)]) for fault in faults if str(fault) in known]
        self.waiting = [Trial(fault) for fault in faults if str(fault) not in known]
        self.killed: list[Trial] = []  # by tests that have to pass without any fault yet
        self.sound = set(known.get("sound", ()))  # what passes so
        self.without: dict[str, None] = {}  # what fails so

    def keep(self, fault: Fault, happened: str) -> None:
        """Take a fault as judged."""
        self.found.append((fault, happened))
        self._note(str(fault), happened)

    def _note(self, *what: str | list[str]) -> None:
        if self.judged:
            with self.judged.open("a", encoding="utf-8") as file:
                print(json.dumps(what), file=file)

    def next(self, folder: Path) -> tuple[list[Trial], Child]:
        """Start tests with a fault, or without it what killed any."""
        if self.waiting and len(self.killed) < TOGETHER:
            trial = self.waiting.pop(0)
            return [trial], Child(trial.fault, trial.less(self.without), folder)
        self.killed.sort(key=lambda trial: trial.check)
        trials = [one for one in self.killed if one.alone][:1] or self.killed[:TOGETHER]
        arguments = sorted({argument for trial in trials for argument in trial.check})
        self.killed = [one for one in self.killed if one not in trials]
        return trials, Child(None, arguments, folder)

    def after(self, trials: list[Trial], child: Child, happened: str) -> None:
        """Take in how a child ended: faults are judged, or wait for what comes next."""
        if child.fault is None:
            self._without_fault(trials, child, happened)
            return
        (trial,) = trials
        trial.check = told = child.failed()
        if not told or any("::" not in one for one in told):  # files are read, and tests counted
            trial.check = (*(told or trial.less(self.without)), "--collect-only")
            trial.alone = True
        reason = _reason(trial.fault)
        if happened == "survived" and reason:
            happened = f"equivalent, {reason}"
        elif happened in ("survived", NONE_RAN) and trial.wider:
            trial.arguments, trial.wider = trial.wider, ()
            self.waiting.insert(0, trial)
            return
        by = f" by {' '.join(told)}" if happened.startswith("killed") else ""
        print(f"{child.processor_s:5.1f} s {happened}: {trial.fault}{by}", flush=True)
        if by and not self.sound.issuperset(trial.check):
            self.killed.append(trial)
        else:
            self.keep(trial.fault, happened.split(" (")[0])

    def _without_fault(self, trials: list[Trial], child: Child, happened: str) -> None:
        fails = () if happened == "survived" else child.failed()
        if fails:
            print("fails without any fault, left out:", *fails, sep="\n    ", flush=True)
            self.without |= dict.fromkeys(fails)
        if happened in ("survived", "killed"):  # else the others did not run
            self.sound |= set(child.arguments) - {"--collect-only", *fails}
            self._note("sound", sorted(self.sound))
        # A test's parameters may have a name that only the fault gives.
        unknown = happened == "killed (ended with 4)"
        for trial in trials:
            if unknown and (len(trials) > 1 or any("[" in one for one in trial.check)):
                if len(trials) == 1:
                    trial.check = tuple(one.split("[")[0] for one in trial.check)
                trial.alone = True
                self.killed.append(trial)
                continue
            left = any(one.startswith("tests/") for one in trial.less(self.without))
            if happened == "survived" or self.sound.issuperset(trial.check):
                self.keep(trial.fault, "killed")
            elif left and self.without.keys() & set(trial.check):
                self.waiting.append(trial)
            elif left and fails:
                self.killed.append(trial)
            else:
                shutil.copy(child.folder / "said", ROOT / "broken.log")
                print(f"no test runs, see broken.log: {' '.join(trial.arguments)}", flush=True)
                self.keep(trial.fault, "survived")


def judged(
    faults: list[Fault], jobs: int, seconds: float = float("inf"), known: Path | None = None
) -> list[tuple[Fault, str]]:
    """Return every fault with what happened; print each as it is known, with its processor time.

    seconds: no fault is planted later; the others are left out, and those whose tests run on.
    known: a file of verdicts of earlier runs of these faults, which it adds to.
    """
    begun = time.monotonic()
    run = Run(faults, known)
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        _warmed(Path(name))
        free = [scratch(Path(name) / str(job)) for job in range(jobs)]
        running: list[tuple[list[Trial], Child]] = []
        while run.waiting or run.killed or running:
            over = time.monotonic() - begun - seconds
            if over > 0:
                run.waiting.clear()
            if over > GRACE_S:
                for one in [one for one in running if one[1].fault is not None]:
                    running.remove(one)
                    free.append(one[1].stopped())
                    print(f"left out, its tests were still running: {one[1].fault}", flush=True)
            while free and (run.waiting or run.killed):
                running.append(run.next(free.pop()))
            time.sleep(0.02)
            for trials, child in list(running):
                if happened := child.ended():
                    running.remove((trials, child))
                    free.append(child.folder)
                    run.after(trials, child, happened)
    return run.found


def _warmed(folder: Path) -> None:
    """Begin with what this user's tests compiled, which names the sources that it was made from."""
    (folder / "cache").mkdir(mode=0o700)
    own = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    for made, place in (("gemmule/kernels", "cache/kernels"), ("gemmule-cuemu", "gemmule-cuemu")):
        unfinished = shutil.ignore_patterns("*.lock", "build-*", "new-*", "probe-*")
        if (own / made).is_dir():
            with contextlib.suppress(shutil.Error):  # others may delete what is old meanwhile
                shutil.copytree(
                    own / made, folder / place, ignore=unfinished, copy_function=_linked
                )


def _linked(source: str, target: str) -> None:
    """Give a file another name: what was built for the emulator is gigabytes, and never changed."""
    try:
        os.link(source, target)
    except OSError:  # another disk
        shutil.copy2(source, target)


def _reason(fault: Fault) -> str:
    """Return why a fault changes nothing that can be seen, or an empty text."""
    shown = re.sub(r":\d+ ", " ", str(fault), count=1)
    return EQUIVALENT.get(shown, "")


def _of_seed(seed: int, count: int, wanted: list[str]) -> list[Fault]:
    """Return a seed's faults of the wanted files, mechanical ones and listed ones by turns."""
    listed = sorted(by_hand(), key=lambda fault: random.Random(f"{seed} {fault}").random())
    pairs = itertools.zip_longest(mechanical(count, seed), listed)
    faults = [fault for pair in pairs for fault in pair if fault is not None]
    return [f for f in faults if any(fnmatch.fnmatch(f.path, p) for p in wanted)]


def main() -> int:
    """Run the faults and print the survivors; 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("patterns", nargs="*", metavar="PATTERN", help="of paths, *scalars*")
    parser.add_argument("--seed", type=int, action="append", help="several draw from each")
    parser.add_argument("--mechanical", type=int, default=len(FAULTS["by_hand"]))
    parser.add_argument("--faults", type=int, help="of a seed, half of them mechanical")
    parser.add_argument("--skip", type=int, default=0, help="as many of the seed's first faults")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="plant none later")
    parser.add_argument("--judged", type=Path, help="go on where a run with this file ended")
    parser.add_argument("--record", action="store_true", help="keep the outcome in the evidence")
    parser.add_argument("--into", type=Path, default=FILE, help="--record, added to this file")
    parser.add_argument("--list", action="store_true", help="print the faults and plant none")
    given = parser.parse_args()
    seeds = given.seed or [secrets.randbelow(10**6)]
    print("seed", *seeds, flush=True)
    for old in outdated():
        print(f"no longer fits, so it is left out: {old}", flush=True)
    wanted = given.patterns or ["*"]
    part = slice(given.skip, given.faults)
    drawn = [_of_seed(seed, given.mechanical, wanted)[part] for seed in seeds]
    faults = list(dict.fromkeys(fault for one in drawn for fault in one))
    if given.list:
        print(*faults, sep="\n")
        return 0
    for name in (
        "numpy",
        "llvmlite",
        "ml_dtypes",
        "hypothesis",
        "pytest",
    ):  # once, for all children
        importlib.import_module(name)
    if given.judged:
        given.judged.touch()
    every = judged(faults, given.jobs, given.seconds, given.judged)
    found = [one for one in every if one[1] != "does not compile"]
    print(f"{len(every) - len(found)} of {len(every)} do not compile, and are no faults")
    survivors = [fault for fault, happened in found if happened == "survived"]
    equal = sum(happened.startswith("equivalent") for _, happened in found)
    for fault in survivors:
        print(f"SURVIVED {fault}")
    killed = len(found) - len(survivors) - equal
    by_seed = sum(fault.kind != "by hand" for fault, _ in found)
    if given.record or given.into != FILE:
        keep(
            " ".join(["planted faults:", *wanted]),
            len(found),
            len(survivors),
            f"python tests/mutation.py {' '.join(f'--seed {one}' for one in seeds)} "
            + f"--mechanical {given.mechanical} "
            + (f"--skip {given.skip} " if given.skip else "")
            + (f"--faults {given.faults} " if given.faults else "")
            + " ".join(given.patterns),
            f"{killed} killed by the tests that watch their file, {equal} proved equivalent, "
            f"{by_seed} made mechanically",
            file=given.into,
            add=given.into != FILE,
        )
    used = os.times()
    print(f"{used.children_user + used.children_system:.0f} s of processor time in this run")
    print(f"{by_seed} of them mechanical, by seed {', '.join(map(str, seeds))}")
    if len(every) < len(faults):
        print(f"{len(faults) - len(every)} were not judged")
    print(f"{len(found)} faults: {killed} killed, {equal} equivalent, {len(survivors)} survived")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
