"""Whether the words of a drawing of the ladders' pages can be read: inside, apart, large enough."""

from __future__ import annotations

import itertools

from pages.figures.drawing import Figure


def check_words(figure: Figure) -> None:
    for words in figure.words:
        inside = words.left >= 4 and words.left + words.width <= figure.width - 4
        assert inside, f"{words.text!r} leaves the drawing"
        assert words.base <= figure.height - 5, f"{words.text!r} leaves the drawing"
        assert words.size >= 11, f"{words.text!r} is too small to read"
    for one, other in itertools.combinations(figure.words, 2):
        beside = one.left + one.width < other.left + 2 or other.left + other.width < one.left + 2
        apart = abs(one.base - other.base) >= 0.8 * min(one.size, other.size)
        assert beside or apart, f"{one.text!r} and {other.text!r} overlap"
