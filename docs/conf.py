"""The documentation's build: `make docs`, into build/docs."""

import json
import re
import sys
from pathlib import Path

from sphinx.domains.python import PyObject

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

project = "fedjax_lab"
author = "the authors of fedjax_lab"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns: list[str] = []

# Markdown: headings can be linked to, as GitHub does it.
myst_heading_anchors = 3
myst_enable_extensions = ["dollarmath"]

# Docstrings: Google style; shapes and dtypes stand in the text, so signatures need no types.
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
napoleon_attr_annotations = False
smartquotes_action = "D"  # dashes; quotes stay straight
autodoc_typehints = "none"
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 88
add_module_names = False
toc_object_entries_show_parents = "hide"

# Python's own exceptions and types are described elsewhere.
nitpick_ignore_regex = [("py:exc", r"[\w.]+Error"), ("py:class", r"(enum|typing|collections)\..*")]

html_theme = "furo"
html_title = "fedjax_lab"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = ["sort.js"]
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
pygments_style = "friendly"
pygments_dark_style = "monokai"

_LITERAL = re.compile(r"(``.+?``)")
_RULE = re.compile(r"^\s*=+(\s+=+)+\s*$")
_SEVERAL = re.compile(r"^:(param|ivar) (\w+(?:, \w+)+): (.*)$")
# A field that begins like "N." would be read as the first item of a list.
_LETTER = re.compile(r"^(\s*(?::\w+ [^:]*:\s+)?)([A-Za-z]\.)(?=\s|$)")


def _escape(text: str) -> str:
    """Bars are norms in our docstrings, and substitutions in reStructuredText."""
    parts = _LITERAL.split(text)
    plain = [part.replace("||", "‖").replace("|", r"\|") for part in parts[::2]]
    parts[::2] = plain
    return "".join(parts)


def _escape_row(line: str, rule: str) -> str:
    """The same in a table, whose columns stay where they are."""
    start = re.match(r"\s*=+\s+", rule).end()
    return _escape(line[:start]).rstrip().ljust(start) + _escape(line[start:])


# An attribute's docstring, "Clients: N", would be read as a type and a text.
_attributes: dict[str, list[str]] = {}


def _keep_attribute(app, what, name, obj, options, lines):
    if what in ("attribute", "data", "property"):
        _attributes[name] = list(lines)


def _one_field_each(lines: list[str]) -> list[str]:
    """Fields of several names, "a, b: text", as a field for each name with the same text."""
    separate: list[str] = []
    fields: list[list[str]] = []
    for line in [*lines, ""]:
        match = _SEVERAL.match(line)
        if fields and not (line.startswith(" ") and not match):
            separate += [part for field in fields for part in field]
            fields = []
        if match:
            kind, names, text = match.groups()
            fields = [[f":{kind} {name}: {text}"] for name in names.split(", ")]
        elif fields:
            fields = [[*field, line] for field in fields]
        else:
            separate.append(line)
    return separate[:-1]


def _read_as_plain_text(app, what, name, obj, options, lines):
    lines[:] = _one_field_each(_attributes.pop(name, lines))
    rule = None
    escaped = []
    for line in lines:
        if _RULE.match(line):
            rule = line
        elif not line.strip():
            rule = None
        if rule and not _RULE.match(line):
            escaped.append(_escape_row(line, rule))
        else:
            escaped.append(_LETTER.sub(r"\1\\\2", _escape(line)))
    lines[:] = escaped


def _skip(app, what, name, obj, skip, options):
    """A NamedTuple's fields are described under its Attributes, not once more one by one."""
    return True if type(obj).__name__ == "_tuplegetter" else None


def _show_notebooks(app):
    """A page for each notebook: its text, and its code in blocks."""
    for file in sorted((ROOT / "experiments" / "notebooks").glob("*.ipynb")):
        cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
        parts = [
            text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```"
            for cell in cells
            if (text := "".join(cell["source"]).strip())
        ]
        page, new = Path(app.srcdir) / "notebooks" / f"{file.stem}.md", "\n\n".join(parts) + "\n"
        if not page.exists() or page.read_text(encoding="utf-8") != new:
            page.write_text(new, encoding="utf-8")


def setup(app):
    """Connect what reads docstrings: before napoleon, and after it has made fields of sections."""
    app.connect("builder-inited", _show_notebooks)
    app.connect("autodoc-process-docstring", _keep_attribute, priority=100)
    app.connect("autodoc-process-docstring", _read_as_plain_text, priority=900)
    app.connect("autodoc-skip-member", _skip)
    for field in PyObject.doc_field_types:
        if field.name == "variable":
            field.label = "Attributes"
