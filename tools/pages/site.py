"""``PYTHONPATH=tools python -m pages.site``: build the documentation to browse and search offline.

The pages are the Markdown files that one reads in the repository too. `stage` copies them to
``docs/_build/source`` and adds what only a site has: its navigation, which follows the headings and
links of docs/index.md, the text of every public name, of every command, of examples and notebooks.
Sphinx turns that into ``docs/_build/html/<version>``; a warning is an error. Versions that were
built there before stay, and pages offer all of them (`pages.versions`).
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click

import gemmule
from gemmule_lab import cli
from index_page import with_links
from pages import interfaces, versions

BUILD = Path("docs") / "_build"
# Pages that lie elsewhere in the repository, and their names on the site.
OUTSIDE = {
    "README.md": "readme.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "reporting.md",
    "evidence/README.md": "evidence.md",
    "examples/README.md": "examples/index.md",
}
LISTED = {"decisions": "Decisions", "notes": "Notes"}  # folders of pages, and their titles


def stage(root: Path, target: Path) -> None:
    """Write the sources of the site below `target`, which is emptied first."""
    shutil.rmtree(target, ignore_errors=True)
    skipped = shutil.ignore_patterns("_build", "_static", "_templates", "conf.py", "__pycache__")
    shutil.copytree(root / "docs", target, ignore=skipped)
    places = {path.resolve(): path.relative_to(root / "docs") for path in _markdown(root)}
    places |= {(root / path).resolve(): Path(name) for path, name in OUTSIDE.items()}
    for path in sorted((root / "examples").glob("*.py")):
        places[path.resolve()] = Path("examples") / f"{path.stem}.md"
    for path in sorted((root / "examples" / "notebooks").glob("*.ipynb")):
        places[path.resolve()] = Path("examples") / f"{path.stem}.md"
    for folder in LISTED:
        places[(root / "docs" / folder).resolve()] = Path(folder) / "index.md"
    for path, place in places.items():
        text = _page(path)
        (target / place).parent.mkdir(parents=True, exist_ok=True)
        (target / place).write_text(_relinked(text, path, places, (root, target)), "utf-8")
    _add(target / "index.md", navigation((root / "docs" / "index.md").read_text("utf-8"), root))
    for name, text in interfaces.pages().items():
        (target / "api" / f"{name}.md").parent.mkdir(exist_ok=True)
        (target / "api" / f"{name}.md").write_text(text, "utf-8")
    _add(target / "api.md", _tree(None, [f"api/{name}" for name in interfaces.pages()]))
    _add(target / "commands.md", commands())
    named = [f"{name} <{name}>" for name in _siblings(target / "examples")]
    _add(target / "examples" / "index.md", _tree(None, named))


def _markdown(root: Path) -> Iterator[Path]:
    built = root / BUILD
    return (path for path in (root / "docs").rglob("*.md") if built not in path.parents)


def _siblings(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.md") if path.stem != "index")


def _add(page: Path, text: str) -> None:
    page.write_text(f"{page.read_text('utf-8').rstrip()}\n\n{text}\n", "utf-8")


def _page(path: Path) -> str:
    """Return the Markdown of a page, of an example, of a notebook, or of a list of a folder."""
    if path.is_dir():
        return f"# {LISTED[path.name]}\n\n{_tree(None, _siblings(path), hidden=False)}\n"
    text = path.read_text("utf-8")
    if path.suffix == ".py":
        words = ast.get_docstring(ast.parse(text)) or ""
        head, _, rest = words.partition("\n")
        return f"# {head.rstrip('.')}\n\n{rest.strip()}\n\n```python\n{text.rstrip()}\n```\n"
    return notebook(text) if path.suffix == ".ipynb" else text


def notebook(text: str) -> str:
    """Return the cells of a notebook as Markdown."""
    import nbformat

    cells = nbformat.reads(text, as_version=4).cells  # type: ignore[no-untyped-call]
    return "\n\n".join(
        f"```python\n{cell.source}\n```" if cell.cell_type == "code" else cell.source
        for cell in cells
    )


def _relinked(text: str, page: Path, places: dict[Path, Path], roots: tuple[Path, Path]) -> str:
    """Return a page whose links lead to the staged pages, and to copies of all other files.

    roots: the source tree, and where the pages are staged.
    """
    root, target = roots

    def led(path: str, is_picture: bool) -> str | None:
        if not path:
            return ""
        file = (page.parent / path).resolve()
        new = places.get(file)
        if new is None and is_picture:
            new = file.relative_to(root / "docs")  # pictures lie as in docs
        if new is None:
            new = Path("files") / file.relative_to(root)
            (target / new).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target / new)
        return os.path.relpath(new, places[page].parent)

    return with_links(text, led)


def navigation(index: str, root: Path) -> str:
    """Return the trees of the site, one for each heading of docs/index.md with its pages.

    A page is called what the index calls it.
    """
    trees = []
    for part in index.split("\n## ")[1:]:
        title, _, rest = part.partition("\n")
        found = []
        for words, path in re.findall(r"\[([^\]]+)\]\(([^)#]+)", rest):
            name = os.path.relpath(root / "docs" / path, root)
            page = OUTSIDE.get(name) or os.path.relpath(name, "docs")
            page = f"{page}/index" if path.endswith("/") else page.removesuffix(".md")
            found.append(f"{words} <{page}>")
        trees.append(_tree(title.strip(), found))
    return "\n\n".join(trees)


def _tree(caption: str | None, pages: list[str], *, hidden: bool = True) -> str:
    lines = ["```{toctree}"]
    lines += [":hidden:"] * hidden + ([f":caption: {caption}"] if caption else [":maxdepth: 1"])
    return "\n".join([*lines, "", *pages, "```"])


def commands() -> str:
    """Return the help of every command, as it prints it."""
    parts = []
    context = click.Context(cli.cli, info_name="gemmule", terminal_width=88, max_content_width=88)
    for name in cli.cli.list_commands(context):
        command = cli.cli.get_command(context, name)
        if command is not None and not command.hidden:
            inner = click.Context(command, parent=context, info_name=name)
            parts.append(f"## gemmule {name}\n\n```text\n{command.get_help(inner)}\n```")
    return "\n\n".join(parts)


@click.command()
@click.option("--root", type=Path, default=Path(), help="The source tree; default: here.")
@click.option("--build", type=Path, help="Where to build; default: docs/_build.")
def site(root: Path, build: Path | None) -> None:
    """Build the site, in the folder html of where to build, beside other versions of it."""
    build = (root / BUILD if build is None else build).resolve()
    stage(root.resolve(), build / "source")
    run = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet"]
    run += ["-c", str(root / "docs"), "-d", str(build / "trees"), "-b", "html"]
    target = build / "html" / gemmule.__version__
    shutil.rmtree(target, ignore_errors=True)
    if subprocess.run([*run, str(build / "source"), str(target)], check=False).returncode:
        raise click.ClickException("Sphinx warned; see above.")
    known = versions.write(build / "html")
    click.echo(f"wrote {build / 'html' / 'index.html'}: gemmule {', '.join(known)}")


if __name__ == "__main__":
    site()
