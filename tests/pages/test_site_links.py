"""Every link of every page leads to a file and a heading; every page is found from the index.

And thirty questions and more that new users ask (questions.toml), each with the page that answers:
it has that heading, says those words under it, and is one click from the README or from the index.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from checkout import ROOT
from site_pages import DOCS, PAGES, headings, links, name_of, slugs

LISTED = ("docs/notes/", "docs/decisions/")  # the index links to these folders as a whole
START = (ROOT / "README.md", DOCS / "index.md")
QUESTIONS = tomllib.loads((ROOT / "tests/pages/questions.toml").read_text("utf-8"))["question"]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    broken = []
    for file, place in links(page):
        if not file.exists():
            broken.append(str(file))
        elif place and file.suffix == ".md" and place not in slugs(file):
            broken.append(f"{file.name}#{place}")
    assert not broken


def test_broken_links_would_be_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A `b` c_d\n\n[x](gone.md) [y](#a-b-c_d) [z](#other)\n```\n[v](w)\n```\n")
    assert slugs(page) == {"a-b-c_d"}
    assert [(link.file.name, link.place) for link in links(page)] == [
        ("gone.md", ""),
        ("page.md", "a-b-c_d"),
        ("page.md", "other"),
    ]


def test_every_page_is_linked_from_the_index() -> None:
    linked = {link.file for link in links(DOCS / "index.md")} | {DOCS / "index.md"}
    lonely = [name_of(page) for page in PAGES if page.resolve() not in linked]
    assert not [name for name in lonely if not name.startswith(LISTED)]


@pytest.mark.parametrize("question", QUESTIONS, ids=[one["asks"] for one in QUESTIONS])
def test_a_question_is_answered_one_click_away(question: dict[str, Any]) -> None:
    page = ROOT / question["page"]
    near = {link.file for start in START for link in links(start)} | set(START)
    assert page in near
    assert question["heading"] in headings(page)
    answer = under(page, question["heading"])
    assert not [words for words in question["says"] if words not in answer]


def under(page: Path, heading: str) -> str:
    """Return what a page says under a heading, up to the next one that is not below it."""
    hidden = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)  # code has its own lines of #
    text = hidden.sub(lambda code: code[0].replace("#", "\0"), page.read_text("utf-8"))
    begin = re.search(rf"^(#+) {re.escape(heading)}\s*$", text, re.MULTILINE)
    assert begin is not None
    end = re.search(rf"^#{{1,{len(begin[1])}}} ", text[begin.end() :], re.MULTILINE)
    return text[begin.end() :][: end.start() if end else None].replace("\0", "#")


def test_three_kinds_of_users_ask_thirty_questions() -> None:
    assert len(QUESTIONS) >= 30
    asked = [one["who"] for one in QUESTIONS]
    assert set(asked) == {"NumPy", "serving", "student"}
    assert min(asked.count(who) for who in set(asked)) >= 8
    assert len({one["asks"] for one in QUESTIONS}) == len(QUESTIONS)
