"""Where the words of a drawing lie, as wide as a common sans serif sets them."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import dataclass

SIZES = {"title": 17.0}  # of classes; of all others 13
DIGIT, LETTER, BOLD = 0.61, 0.52, 1.08  # of the size; letters with spaces on average


@dataclass(frozen=True)
class Words:
    """A text and its box."""

    text: str
    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: Words) -> bool:
        """Tell whether two boxes overlap, or stand less than a hair's breadth beside each other."""
        wide = min(self.right, other.right) - max(self.left, other.left)
        tall = min(self.bottom, other.bottom) - max(self.top, other.top)
        return wide > -1 and tall > 2


def words_of(drawing: str) -> Iterator[Words]:
    """Yield the words of an SVG document, turned ones too."""
    for node in ET.fromstring(drawing).iter("{http://www.w3.org/2000/svg}text"):
        text = (node.text or "").strip()
        if not text:
            continue
        size = SIZES.get(node.get("class", ""), 13.0)
        if styled := re.search(r"font-size:([\d.]+)px", node.get("style", "")):
            size = float(styled[1])
        width = size * sum(DIGIT if one.isdigit() else LETTER for one in text)
        width *= BOLD if node.get("class") == "title" else 1
        x, y = float(node.get("x", "0")), float(node.get("y", "0"))
        start = {"middle": x - width / 2, "end": x - width}.get(node.get("text-anchor", ""), x)
        box = (start, y - 0.75 * size, start + width, y + 0.25 * size)
        if turned := re.match(r"rotate\(-90 ([\d.]+) ([\d.]+)\)", node.get("transform", "")):
            cx, cy = float(turned[1]), float(turned[2])
            left, top, right, bottom = (box[0] - cx, box[1] - cy, box[2] - cx, box[3] - cy)
            box = (cx + top, cy - right, cx + bottom, cy - left)
        yield Words(text, *box)


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
