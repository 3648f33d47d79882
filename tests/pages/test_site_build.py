"""The site is built without a warning, asks for nothing outside its folder, and can be searched."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

import chromium
import gemmule
from checkout import ROOT
from index_page import for_an_index, urls_of, with_links
from pages import interfaces, site, versions

pytest.importorskip("sphinx")
SECONDS = 240


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, tree: dict[str, str]) -> Path:
    """The site, built once as `make site` builds it, elsewhere, over one with another page."""
    folder = tmp_path_factory.mktemp("site")
    gone = folder / "html" / gemmule.__version__ / "gone.html"
    gone.parent.mkdir(parents=True)
    gone.write_text("<html></html>")
    run = [sys.executable, "-m", "pages.site", "--root", str(ROOT), "--build", str(folder)]
    done = subprocess.run(run, env=tree, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr
    assert not gone.exists()
    return folder / "html" / gemmule.__version__


def test_the_site_asks_for_nothing_outside(built: Path) -> None:
    """No script, style, font or picture comes from elsewhere."""
    asked = re.compile(r"<(?:script|img|link|iframe|source)\b[^>]*?(?:src|href)=\"(https?:)?//")
    for page in built.rglob("*.html"):
        assert not asked.search(page.read_text("utf-8")), page.name
    for sheet in built.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*[\"']?(https?:)?//", sheet.read_text("utf-8"))


def test_links_within_the_site_lead_somewhere(built: Path) -> None:
    broken = []
    texts = {page: page.read_text("utf-8") for page in built.rglob("*.html")}
    places = {page: set(re.findall(r"\bid=\"([^\"]+)\"", text)) for page, text in texts.items()}
    for page, text in texts.items():
        for target in re.findall(r"<a\b[^>]*\bhref=\"([^\"]*)\"", text):
            if re.match(r"[a-z]+:", target):
                continue
            path, _, place = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            lost = bool(place) and file in places and place not in places[file]
            if lost or not file.is_file():
                broken.append((page.name, target))
    assert not broken


@pytest.mark.parametrize("word", ["int4", "eigsh", "warp_per_row", "prefetched_row", "hqq"])
def test_what_is_there_is_found(built: Path, word: str) -> None:
    """The index of the search knows the words of guides, code and names."""
    text = (built / "searchindex.js").read_text("utf-8")
    index = json.loads(text[text.index("(") + 1 : text.rindex(")")])
    assert any(word in known for known in [*index["terms"], *index["titleterms"]])


def test_every_public_name_has_its_text(built: Path) -> None:
    for module, names in interfaces.MODULES.items():
        text = (built / "api" / f"{module}.html").read_text("utf-8")
        for name in names:
            assert f'id="{module}.{name}"' in text, name


def _reaches(browser: chromium.Chromium, page: Path) -> bool:
    """Wait until a browser is on a page; one that goes away answers nothing."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        with suppress(RuntimeError):
            if browser.run("location.href") == page.as_uri():
                return True
        time.sleep(0.05)
    return False


def test_a_reader_switches_to_another_version_and_stays_on_the_page(
    built: Path, tmp_path: Path
) -> None:
    """To its first page where it has none of that name; without another there is no choice."""
    if chromium.found() is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    versions.write(built.parent)
    for name in ("0.10.0", "0.9.1", "notes", built.name):
        shutil.copytree(built, tmp_path / name)
    (tmp_path / "0.9.1" / "faq.html").unlink()
    assert list(versions.write(tmp_path)) == ["0.10.0", "0.9.1", built.name]
    browser = chromium.Chromium()
    chosen = "document.querySelector('.versions select')"
    try:
        browser.show(built / "faq.html", 1280, 800, "light")
        assert browser.run(f"{chosen}.checkVisibility()") is False
        for page, version, there in (
            ("api/gemmule", "0.9.1", "0.9.1/api/gemmule"),
            ("faq", "0.10.0", "0.10.0/faq"),
            ("faq", "0.9.1", "0.9.1/index"),
        ):
            browser.show(tmp_path / built.name / f"{page}.html", 1280, 800, "light")
            assert browser.run(f"{chosen}.checkVisibility()")
            assert browser.run(f"{chosen}.value") == built.name
            browser.run(f"{chosen}.value = '{version}'; setTimeout({chosen}.onchange, 50); 0")
            assert _reaches(browser, tmp_path / f"{there}.html")
        browser.ask("Page.navigate", url=(tmp_path / "index.html").as_uri())
        assert _reaches(browser, tmp_path / "0.10.0" / "index.html"), "the newest"
    finally:
        browser.close()


def test_the_navigation_follows_the_index() -> None:
    index = "# T\n\n## First\n\n[a](a.md) [b](b/) [c](../README.md)\n\n## Second\n\n[d](d.md#x)\n"
    first, second = site.navigation(index, ROOT).split("\n\n```{toctree}")
    assert ":caption: First" in first
    assert first.rstrip("`\n").endswith("\n\na <a>\nb <b/index>\nc <readme>")
    assert second.rstrip("`\n").endswith(":caption: Second\n\nd <d>")


def test_a_notebook_becomes_a_page() -> None:
    path = ROOT / "examples" / "notebooks" / "first_steps.ipynb"
    text = site.notebook(path.read_text("utf-8"))
    assert text.startswith("# First steps\n")
    assert "```python\nimport numpy as np\n" in text


def test_the_readme_of_an_index_leads_to_the_repository() -> None:
    """With an address every relative link has it, without one the words stay alone."""
    text = (ROOT / "README.md").read_text("utf-8")
    left: list[str] = []

    def noted(path: str, is_picture: bool) -> str:
        left.append(path)
        return path

    with_links(for_an_index(text, ""), noted)
    assert not [path for path in left if path]
    with_links(for_an_index(text, "https://host/owner/gemmule/"), noted)
    assert not [path for path in left if path]
    addressed = for_an_index(text, "https://host/owner/gemmule/")
    assert "(https://host/owner/gemmule/blob/HEAD/docs/index.md)" in addressed
    assert "(https://host/owner/gemmule/raw/HEAD/docs/img/bytes.svg)" in addressed
    assert "A.T is used where it lies" in for_an_index(text, "")


def test_code_keeps_what_looks_like_a_link() -> None:
    text = "[a](b.md)\n```py\nx = [a](b)\n```\n"
    assert for_an_index(text, "") == "a\n```py\nx = [a](b)\n```\n"


def test_addresses_come_from_one_field() -> None:
    assert urls_of("") == {}
    found = urls_of("https://host/owner/gemmule/")
    assert set(found) == {"Source", "Documentation", "Changelog", "Issues"}
    assert all(url.startswith("https://host/owner/gemmule") for url in found.values())
