"""Rewrites the `__shared__` declarations of CUDA C++ text, which macros alone cannot express.

Every block of a cluster is alive at once in the emulator, so a shared variable is not a C++ static:
its declaration becomes a reference into the shared memory of the block that the thread belongs to.
Line numbers stay as they are.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path

_QUOTED_INCLUDE = re.compile(r'^([ \t]*#[ \t]*include[ \t]*)"([^"\n]+)"', re.MULTILINE)
_COMMENT_OR_STRING = re.compile(
    r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.DOTALL
)
_DECLARATOR = re.compile(r"(\w+)\s*((?:\[[^\]]*\]\s*)*)$", re.DOTALL)


@dataclass
class Sources:
    """The text to compile, the digest of everything it was made from, and rewritten headers."""

    text: str
    digest: str
    headers: dict[str, str] = field(default_factory=dict)  # file name -> text


def blank_comments(text: str) -> str:
    """Return `text` with comments blanked; offsets and line numbers are unchanged."""

    def blank(match: re.Match[str]) -> str:
        found = match.group(0)
        return re.sub(r"[^\n]", " ", found) if found.startswith("/") else found

    return _COMMENT_OR_STRING.sub(blank, text)


def _closing(text: str, start: int) -> int:
    """Return the index after the parenthesis that closes the one at `start`."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i + 1
    raise ValueError("unbalanced parentheses in a __shared__ declaration")


def _take_alignment(declaration: str) -> tuple[str, list[str]]:
    """Split alignas(..) and __align__(..) off a declaration."""
    found = []
    while match := re.search(r"\b(?:alignas|__align__)\s*\(", declaration):
        end = _closing(declaration, match.end() - 1)
        found.append(declaration[match.end() : end - 1])
        declaration = declaration[: match.start()] + " " + declaration[end:]
    return declaration, found


def _split_commas(text: str) -> list[str]:
    """Split at the commas outside brackets; < > count as brackets only outside [] and ()."""
    parts, depth, angle, last = [], 0, 0, 0
    for i, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if depth == 0:
            angle += (char == "<") - (char == ">")
            if char == "," and angle == 0:
                parts.append(text[last:i])
                last = i + 1
    return [*parts, text[last:]]


def rewrite_declaration(declaration: str) -> str:
    """Return plain C++ for one `[extern] __shared__ ...;` declaration (given without the `;`).

    >>> rewrite_declaration("extern __shared__ float xs[]")
    'float* xs = reinterpret_cast<float*>(cuemu::dynamic_shared(cuemu::widest({alignof(float)})));'
    """
    body, alignments = _take_alignment(declaration)
    dynamic = re.search(r"\bextern\b", body) is not None
    body = re.sub(r"\b(?:extern|static|__shared__)\b", " ", body)
    first, *others = _split_commas(body)
    match = _DECLARATOR.search(first.rstrip())
    if match is None:
        raise ValueError(f"cannot read this __shared__ declaration: {declaration.strip()!r}")
    base = " ".join(first[: match.start()].split())
    if dynamic:
        widths = ", ".join([f"alignof({base})", *(f"size_t({a})" for a in alignments)])
        name = match.group(1)
        return (
            f"{base}* {name} = reinterpret_cast<{base}*>"
            f"(cuemu::dynamic_shared(cuemu::widest({{{widths}}})));"
        )
    out = []
    for declarator in (match.group(0), *others):
        part = _DECLARATOR.search(declarator.strip())
        if part is None:
            raise ValueError(f"cannot read this __shared__ declaration: {declaration.strip()!r}")
        name, dims = part.group(1), " ".join(part.group(2).split())
        kind, key = f"cuemu_type_{name}", f"cuemu_key_{name}"
        widths = ", ".join([f"alignof({kind})", *(f"size_t({a})" for a in alignments)])
        out.append(
            f"typedef {base} {kind}{dims}; static char {key}; {kind}& {name} = "
            f"*reinterpret_cast<{kind}*>(cuemu::static_shared(&{key}, sizeof({kind}), "
            f"cuemu::widest({{{widths}}})));"
        )
    return " ".join(out)


def rewrite(text: str) -> str:
    """Rewrite every `__shared__` declaration of a file."""
    clean = blank_comments(text)
    out, last = [], 0
    prefix = r"(?:(?:extern|static|(?:alignas|__align__)\s*\([^()]*\))\s+)*"
    for match in re.finditer(prefix + r"\b__shared__\b", clean):
        end = clean.index(";", match.end())
        declaration = clean[match.start() : end]
        out += [clean[last : match.start()], rewrite_declaration(declaration)]
        out.append("\n" * declaration.count("\n"))
        last = end + 1
    return "".join([*out, clean[last:]])


def _find(name: str, directories: list[Path]) -> Path | None:
    for directory in directories:
        if (directory / name).is_file():
            return (directory / name).resolve()
    return None


def collect(path: Path, include: list[Path]) -> Sources:
    """Read a .cu file and the quoted headers it reaches; rewrite what declares shared memory."""
    hasher = hashlib.sha256()
    headers: dict[str, str] = {}
    visiting: dict[Path, str | None] = {}

    def visit(file: Path) -> tuple[str, bool]:
        raw = file.read_text(encoding="utf-8")
        hasher.update(f"{file.name}\0{len(raw)}\0".encode() + raw.encode())
        changed = "__shared__" in blank_comments(raw)
        text = rewrite(raw) if changed else raw

        def resolve(match: re.Match[str]) -> str:
            nonlocal changed
            target = _find(match.group(2), [file.parent, *include])
            if target is None:
                return match.group(0)
            if target not in visiting:
                visiting[target] = None
                inner, inner_changed = visit(target)
                if inner_changed:
                    name = f"{len(headers)}_{target.name}"
                    headers[name] = f'#line 1 "{target}"\n{inner}'
                    visiting[target] = name
            replacement = visiting[target]
            changed = changed or replacement is not None
            return f'{match.group(1)}"{replacement or target}"'

        return _QUOTED_INCLUDE.sub(resolve, text), changed

    text, _ = visit(path.resolve())
    return Sources(text, hasher.hexdigest(), headers)
