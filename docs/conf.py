"""Sphinx's settings for the documentation; `make site` builds it (tools/pages/site.py)."""

import re

import gemmule

project = "gemmule"
author = "The gemmule authors"
copyright = author  # noqa: A001  Sphinx's name for it
version = release = gemmule.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
myst_heading_anchors = 4
myst_enable_extensions = ["attrs_block"]
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_preserve_defaults = True
add_module_names = False
python_use_unqualified_type_names = True
highlight_language = "none"
html_theme = "furo"
html_title = f"gemmule {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["../../versions.js", "versions.js"]  # what lies beside this version; the choice
templates_path = ["_templates"]
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "sidebar/versions.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}
html_copy_source = False
html_show_sphinx = False
pygments_style, pygments_dark_style = "friendly", "github-dark"

_SECTION = re.compile(r"^(Parameters|Returns|Raises|Yields)$")
_PARAMETER = re.compile(r"^([A-Za-z_][\w, ]*) : (.*)$")


def _as_text(app, what, name, obj, options, lines):
    """Turn the sections of a docstring, which are headings there, into bold words and lists."""
    out, listed = [], False
    for number, line in enumerate(lines):
        following = lines[number + 1] if number + 1 < len(lines) else ""
        if _SECTION.match(line) and set(following) == {"-"}:
            out += [f"**{line}**", ""]
            listed = line == "Parameters"
        elif set(line) == {"-"} and number and _SECTION.match(lines[number - 1]):
            continue
        elif listed and (found := _PARAMETER.match(line)):
            out.append(f"- **{found[1]}**: {found[2]}")
        elif listed and line.startswith(" "):
            out.append(f"  {line.strip()}")
        else:
            listed = listed and not line
            out.append(line)
    lines[:] = out


def setup(app):
    """Register what turns docstrings into text."""
    app.connect("autodoc-process-docstring", _as_text)
