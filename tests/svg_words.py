"""Where the words of a drawing lie, as wide as a common sans serif sets them."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import dataclass

SVG = "{http://www.w3.org/2000/svg}"
DIGIT, LETTER, THIN, BOLD = 0.61, 0.6, 0.32, 1.08  # of the size
NARROW = set(" ,.:;'|()[]-ijlrtf")


@dataclass(frozen=True)
class Words:
    """A text, what it is (the class around it), its colour, and its box."""

    text: str
    kind: str
    colour: str
    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: Words) -> bool:
        """Tell whether two boxes overlap, or stand less than a hair's breadth beside each other."""
        wide = min(self.right, other.right) - max(self.left, other.left)
        tall = min(self.bottom, other.bottom) - max(self.top, other.top)
        return wide > -1 and tall > 2


def groups(drawing: str, kind: str) -> list[ET.Element]:
    """Return the groups of a class, in the order of the drawing."""
    return [node for node in ET.fromstring(drawing).iter(f"{SVG}g") if node.get("class") == kind]


def words_of(drawing: str) -> Iterator[Words]:
    """Yield the words of an SVG document, turned ones too."""
    yield from _words(ET.fromstring(drawing), "")


def _words(node: ET.Element, kind: str) -> Iterator[Words]:
    kind = node.get("class", kind)
    text = (node.text or "").strip() if node.tag == f"{SVG}text" else ""
    if text:
        yield _placed(node, text, kind)
    for child in node:
        yield from _words(child, kind)


def _placed(node: ET.Element, text: str, kind: str) -> Words:
    style = node.get("style", "")
    found = re.search(r"([\d.]+)px", style)
    size = float(found[1]) if found else 13.0
    width = size * sum(map(_wide, text))
    width *= BOLD if "bold" in style else 1
    x, y = float(node.get("x", "0")), float(node.get("y", "0"))
    anchor = re.search(r"text-anchor: (\w+)", style)
    start = {"middle": x - width / 2, "end": x - width}.get(anchor[1] if anchor else "", x)
    box = (start, y - 0.75 * size, start + width, y + 0.25 * size)
    if turned := re.match(r"rotate\(-90 ([\d.]+) ([\d.]+)\)", node.get("transform", "")):
        cx, cy = float(turned[1]), float(turned[2])
        left, top, right, bottom = (box[0] - cx, box[1] - cy, box[2] - cx, box[3] - cy)
        box = (cx + top, cy - right, cx + bottom, cy - left)
    colour = re.search(r"fill: (#\w{6})", style)
    return Words(text, kind, colour[1] if colour else "#000000", *box)


def _wide(letter: str) -> float:
    if letter in NARROW:
        return THIN
    return DIGIT if letter.isdigit() else LETTER


def faults(drawing: str) -> list[str]:
    """Return the words that leave a drawing and those that overlap."""
    *_, wide, tall = (float(one) for one in ET.fromstring(drawing).get("viewBox", "").split())
    found = list(words_of(drawing))
    out = [
        f"{one.text!r} leaves the drawing"
        for one in found
        if one.left < -1 or one.right > wide + 1 or one.top < -1 or one.bottom > tall + 1
    ]
    pairs = itertools.combinations(found, 2)
    return out + [f"{a.text!r} meets {b.text!r}" for a, b in pairs if a.meets(b)]
