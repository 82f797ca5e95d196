"""The page of a report: what is in it, and how a browser shows it."""

import base64
import contextlib
import html
import html.parser
import http.server
import json
import re
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

from fedjax_lab.markdown import markdown_table
from fedjax_lab.report import write_report
from fedjax_lab.report.html import html_page
from tests.report.by_hand import CURVE, write_run

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), "")
# The smallest PNG there is: one pixel.
PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="
)


class Outline(html.parser.HTMLParser):
    """Counts tags and collects attributes and text."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes, self.ids, self.text = [], [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self.ids += [value for name, value in attrs if name == "id"]

    def handle_data(self, data):
        self.text.append(data)


def test_a_page_holds_what_the_markdown_shows(tmp_path):
    (tmp_path / "a b.png").write_bytes(PIXEL)
    page = html_page(
        "# The `title` & more\n\n## First\n\n| a | b |\n| :- | -: |\n| x\\|y | 1 |\n\n"
        "![A pixel](a%20b.png)\n\nIts caption.\n\n## First\n\n### Below\n\n`<b>` <script>\n\n"
        "```\n<i>\n```\n\n[there](#first)\n",
        tmp_path,
    )
    outline = Outline(page)
    assert "<title>The title &amp; more</title>" in page
    assert outline.ids == ["the-title-more", "first", "first-2", "below"]
    links = [value for name, value in outline.attributes if name == "href"]
    assert links == ["#first", "#first-2", "#below", "#first"]
    assert not {"script", "b", "i", "link"} & set(outline.tags)
    assert (outline.tags.count("table"), outline.tags.count("td")) == (1, 2)
    assert "x|y" in outline.text
    (source,) = (value for name, value in outline.attributes if name == "src")
    assert base64.b64decode(source.removeprefix("data:image/png;base64,")) == PIXEL
    assert ("alt", "A pixel") in outline.attributes


def test_a_column_of_one_letter_is_a_column():
    page = html_page(markdown_table([["method", "p"], ["fedavg", "-"]]) + "\n", Path())
    assert re.findall(r"<th[^>]*>(.*?)</th>", page) == ["method", "p"]


def test_images_that_cannot_be_put_inside_are_named(tmp_path):
    for source in ("https://example.org/a.png", "//example.org/a.png", "data:image/png;base64,"):
        with pytest.raises(ValueError, match=f"'{source}' is a URL"):
            html_page(f"![]({source})", tmp_path)
    with pytest.raises(ValueError, match=r"'a\.pdf' is none of \.png"):
        html_page("![](a.pdf)", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"none\.png"):
        html_page("![](none.png)", tmp_path)


PROBE = """
<pre id="probe"></pre>
<script>
addEventListener("load", () => {
  const all = (what) => [...document.querySelectorAll(what)];
  const wide = (box) => box.scrollWidth - box.clientWidth;
  const number = getComputedStyle(all("td:nth-child(3)").at(-1));
  document.getElementById("probe").textContent = JSON.stringify({
    title: document.title,
    rows: all("table").map((table) => table.rows.length),
    images: all("img").map((image) => [image.naturalWidth, image.width, image.height]),
    dangling: all("nav a").filter((link) => !document.querySelector(link.getAttribute("href"))),
    links: all("nav a").length,
    page: wide(document.documentElement),
    boxes: Math.max(...all(".table").map(wide)),
    number: [number.textAlign, number.fontVariantNumeric],
    requests: performance.getEntriesByType("resource").map((entry) => entry.name.slice(0, 40)),
  });
});
</script>
"""


@contextlib.contextmanager
def served(folder):
    """(address, the paths that were asked for) of a server of a folder's files."""
    asked = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments):
            super().__init__(*arguments, directory=str(folder))

        def log_request(self, *arguments):
            asked.append(self.path)

        def log_error(self, *arguments):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.skipif(not BROWSER, reason=f"needs one of {', '.join(BROWSERS)}")
@pytest.mark.methods
def test_a_browser_shows_the_report_and_asks_for_nothing_else(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path / f"a{seed}", seed=seed)
        write_run(tmp_path / f"b{seed}", CURVE[::-1], seed=seed, algorithm="scaffold")
    report = write_report([tmp_path], title="Two <methods>")
    page = report.with_suffix(".html").read_text()
    assert "<script" not in page
    assert not re.search(r"(src|href)=\"(?!data:image/png;base64,|#)", page)
    # The page's own policy, with leave for the probe's script.
    assert page.count("style-src 'unsafe-inline'") == 1
    probed = page.replace("style-src", "script-src 'unsafe-inline'; style-src")
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "probed.html").write_text(probed.replace("</body>", f"{PROBE}</body>"))
    with served(folder) as (address, asked):
        command = [
            BROWSER,
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *("--no-first-run", "--disable-background-networking", "--window-size=600,800"),
            *(f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=2000"),
            *("--dump-dom", f"{address}/probed.html"),
        ]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert set(asked) - {"/favicon.ico"} == {"/probed.html"}
    (text,) = re.findall(r'<pre id="probe">(.*?)</pre>', shown.stdout)
    found = json.loads(html.unescape(text))
    assert found["title"] == "Two <methods>"
    tables = re.findall(r"(?:^\|.*\n)+", report.read_text(), re.MULTILINE)
    assert found["rows"] == [table.count("\n") - 1 for table in tables]  # without the rule
    assert len(found["images"]) == 3
    assert all(min(sizes) > 100 for sizes in found["images"])
    assert found["links"] >= 5
    assert found["dangling"] == []
    # On a narrow screen tables scroll in their boxes, and the page does not.
    assert found["page"] <= 0 < found["boxes"]
    assert found["number"] == ["right", "tabular-nums"]
    assert all(name.startswith("data:") for name in found["requests"])
