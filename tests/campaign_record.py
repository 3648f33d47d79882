"""What campaigns found, kept as data: one JSON line for each, from which a page is made.

``evidence/reliability.jsonl`` holds a line for each campaign's latest run. A line is written by the
campaign itself (``--record``), never by hand.
"""

from __future__ import annotations

import datetime as dt
import fcntl
import json
import os
import platform
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
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # campaigns that end together write by turns
        older = [old for old in read(file) if old["what"] == what and add]
        for old in older:
            cases, bad = cases + int(str(old["cases"])), bad + int(str(old["bad"]))
            command = f"{old['command']}; {command}"
        line = {
            "schema": SCHEMA,
            "what": what,
            "cases": cases,
            "bad": bad,
            "command": command,
            "detail": detail,
            "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
            "machine": f"{_gpu() if device else _processor()}, {platform.system()}",
        }
        kept = [old for old in read(file) if old["what"] != what]
        text = "".join(f"{json.dumps(one)}\n" for one in sorted([*kept, line], key=_name))
        file.write_text(text, encoding="utf-8")
    finally:
        os.close(folder)


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
