"""What campaigns found, kept as data: one JSON line for each, from which a page is made.

``evidence/reliability.jsonl`` holds a line for each campaign's latest run. A line is written by the
campaign itself (``--record``), never by hand. ``python tests/campaign_record.py FILE ...`` adds the
lines of files that campaigns on other machines wrote (``--into``), as further runs.
"""

from __future__ import annotations

import datetime as dt
import fcntl
import json
import os
import platform
import sys
from pathlib import Path

from checkout import EVIDENCE

FILE = EVIDENCE / "reliability.jsonl"
SCHEMA = 1


def keep(
    what: str,
    cases: int,
    bad: int,
    command: str,
    detail: str,
    *,
    file: Path = FILE,
    device: bool = False,
    add: bool = False,
) -> None:
    """Write one campaign's outcome, in the place of an earlier one of the same name.

    what: of how much of what; bad: cases that must not be; command: repeats the run, its seed
    included; detail: one line on what the cases were; device: it ran on a GPU, which is named;
    add: earlier runs of this name count too, their cases, what was bad and their commands.
    """
    line: dict[str, object] = {
        "schema": SCHEMA,
        "what": what,
        "cases": cases,
        "bad": bad,
        "command": command,
        "detail": detail,
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
        "machine": f"{_gpu() if device else _processor()}, {platform.system()}",
    }
    put([line], file, add=add)


def put(lines: list[dict[str, object]], file: Path = FILE, *, add: bool = True) -> None:
    """Write lines of campaigns into a file, in the place of earlier ones or added to them."""
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # campaigns that end together write by turns
        every = {_name(old): old for old in read(file)}
        for line in lines:
            old = every.get(_name(line)) if add else None
            every[_name(line)] = line if old is None else _sum(old, line)
        text = "".join(f"{json.dumps(every[name])}\n" for name in sorted(every))
        file.write_text(text, encoding="utf-8")
    finally:
        os.close(folder)


def _sum(old: dict[str, object], line: dict[str, object]) -> dict[str, object]:
    """Return two runs of one campaign as one: the later one's words, and both commands."""
    counts = {name: int(str(old[name])) + int(str(line[name])) for name in ("cases", "bad")}
    return {**line, **counts, "command": f"{old['command']}; {line['command']}"}


def read(file: Path = FILE) -> list[dict[str, object]]:
    """Return the lines of a file of campaigns; none where it is absent."""
    if not file.is_file():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def _name(line: dict[str, object]) -> str:
    return str(line["what"])


def _gpu() -> str:
    from gemmule import backends

    return backends.get("cuda").machine("cuda:0").name


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


if __name__ == "__main__":
    for given in sys.argv[1:]:
        put(read(Path(given)))
