"""Converts Markdown to a self-contained HTML page without scripts, files or network access."""

import base64
import html
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

_TYPES = {".png": "image/png", ".jpg": "image/jpeg", ".svg": "image/svg+xml"}
# Browsers then refuse all external content.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_LONG = 32  # characters of a table's cell that is broken into lines
_CONTENTS = ("h2", "h3")  # in the table of contents


def html_page(markdown: str, folder: Path) -> str:
    """Convert Markdown to an HTML page with embedded images and a table of contents.

    Args:
      markdown: CommonMark with tables; HTML in it is shown as text. The first heading of level 1
        is the page's title.

    Raises:
      FileNotFoundError: an image is missing.
      ValueError: an image is an address, or of a kind other than PNG, JPEG and SVG.
    """
    from markdown_it import MarkdownIt

    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = parser.parse(markdown)
    title, contents = _headings(tokens)
    _mark(tokens, folder)
    region = '<div class="table" role="region" aria-label="table" tabindex="0">\n<table>\n'
    parser.add_render_rule("table_open", lambda *_: region)
    parser.add_render_rule("table_close", lambda *_: "</table>\n</div>\n")
    body = parser.renderer.render(tokens, parser.options, {})
    # The contents follow the title, before the first heading below it.
    place = body.find("<h2")
    navigation = _navigation(contents)
    body = body[:place] + navigation + body[place:] if place >= 0 else body
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>\n{style}</style>\n</head>\n"
        f'<body>\n<main class="page">\n{body}</main>\n</body>\n</html>\n'
    )


def shows(page: str, image: Path) -> bool:
    """Return True if a page of ``html_page`` has a paragraph that is the image of a file."""
    return f'<p class="image"><img src="{_embedded(image)}"' in page


def _headings(tokens: Sequence[Any]) -> tuple[str, list[tuple[str, str, str]]]:
    """Give headings ids; returns (title, (tag, id, text) of those in the contents)."""
    title, contents = "", []
    used: set[str] = set()
    for token, inline in itertools.pairwise(tokens):
        if token.type != "heading_open":
            continue
        text = "".join(child.content for child in inline.children)
        if token.tag == "h1" and not title:
            title = text
        name = base = re.sub(r"[^\w.]+", "-", text.lower()).strip("-") or "section"
        count = 1
        while name in used:
            count += 1
            name = f"{base}-{count}"
        used.add(name)
        token.attrSet("id", name)
        if token.tag in _CONTENTS:
            contents.append((token.tag, name, text))
    return title, contents


def _navigation(contents: Sequence[tuple[str, str, str]]) -> str:
    if len(contents) < 2:
        return ""
    lines = [
        f'<li class="{tag}"><a href="#{html.escape(name)}">{html.escape(text)}</a></li>'
        for tag, name, text in contents
    ]
    return '<nav aria-label="Contents">\n<ul>\n' + "\n".join(lines) + "\n</ul>\n</nav>\n"


def _mark(tokens: Sequence[Any], folder: Path) -> None:
    """Embed images, and mark paragraphs that consist of an image and columns of long text."""
    for opened, token in itertools.pairwise(tokens):
        if token.type != "inline":
            continue
        images = [child for child in token.children if child.type == "image"]
        for image in images:
            image.attrSet("src", _data_uri(str(image.attrGet("src")), folder))
        if images and len(token.children) == 1 and opened.type == "paragraph_open":
            opened.attrSet("class", "image")
    _mark_text(tokens)


def _mark_text(tokens: Sequence[Any]) -> None:
    """Mark the columns of tables that hold long text, which is broken and aligned to the left."""
    column, cells = 0, []
    for opened, token in itertools.pairwise(tokens):
        if opened.type == "tr_open":
            column = 0
        if opened.type in ("th_open", "td_open"):
            cells.append((column, opened, len(token.content)))
            column += 1
        if token.type == "table_close":
            long = {place for place, cell, size in cells if cell.tag == "td" and size > _LONG}
            for place, cell, _ in cells:
                if place in long:
                    cell.attrSet("class", "text")
            cells = []


def _data_uri(source: str, folder: Path) -> str:
    if re.match(r"[a-z][a-z0-9+.-]*:|//", source, re.IGNORECASE):
        raise ValueError(f"the image {source!r} is a URL; it must be the path of a file.")
    path = folder / unquote(source)
    if path.suffix.lower() not in _TYPES:
        raise ValueError(f"the image {source!r} is none of {', '.join(_TYPES)}.")
    return _embedded(path)


def _embedded(image: Path) -> str:
    kind = _TYPES[image.suffix.lower()]
    return f"data:{kind};base64,{base64.b64encode(image.read_bytes()).decode('ascii')}"
