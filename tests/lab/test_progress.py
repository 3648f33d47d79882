"""What is shown on a terminal is what was said, whatever stands in it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gemmule_lab import progress

WORDS = ("reading a[/b].npy", "[bold]y[/bold]", "x [1, 2]", "[red]", "\\[x]", ":smile: 3")


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("words", WORDS)
def test_words_are_shown_as_they_are(
    setting: Callable[..., None], capsys: pytest.CaptureFixture[str], words: str, terminal: bool
) -> None:
    setting(FORCE_COLOR="1" if terminal else None, TERM="xterm", COLUMNS="100")
    progress.say(f"said {words}")
    assert capsys.readouterr().err == f"said {words}\n"
    with progress.working(f"doing {words}") as change:
        progress.say(f"said {words}")
        change(f"then {words}")
    assert list(progress.tracked([1, 2], 2, f"bar {words}")) == [1, 2]
    shown = capsys.readouterr().err
    assert f"said {words}" in shown
    for start in ("then", "bar"):
        assert (f"{start} {words}" in shown) == terminal
