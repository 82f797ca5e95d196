"""What stands in a run directory is shown, and does nothing."""

import csv
import io
import re

import pytest
from markdown_it import MarkdownIt

from fedjax_lab.estimates import Estimate
from fedjax_lab.markdown import code, inert, markdown_table
from fedjax_lab.report import summary_table, write_report
from fedjax_lab.report.csv_text import estimates_csv
from fedjax_lab.report.formats import format_report
from tests.report.by_hand import groups_of, write_run

HOSTILE = [
    "![x](https://example.org/pixel.png)",
    "[click](https://example.org)",
    "<https://example.org>",
    "https://example.org",
    "www.example.org",
    "`` ![x](secret.png) ``",
    "`![x](secret.png)",
    "<img src=x>",
    r"\![x](y.png)",
    "a\n\n![x](y.png)",
    "[x]: https://example.org",
    "a | b ![x](y.png)",
]


def active(markdown):
    """The links, images and tags of a text; autolinks as the most eager reader has them."""
    parser = MarkdownIt("commonmark", {"html": True}).enable("table")
    kinds = set()
    for block in parser.parse(markdown):
        for token in block.children or []:
            kinds.add(token.type)
            if token.type == "text" and re.search(r"://|www\.", token.content):
                kinds.add("link_open")
        kinds.add(block.type)
    return kinds & {"link_open", "image", "html_inline", "html_block"}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_is_no_link_and_no_image(tmp_path, name):
    assert active(f"x {name}") or "\n" in name or name[0] in "`\\" or "]:" in name
    for text in (f"x {inert(name)} y", f"x {code(name)} y", markdown_table([["h"], [inert(name)]])):
        assert active(text) == set()
    folders = {}
    for place, changes in enumerate(
        (
            {"algorithm": name},
            {"algorithm": "b", "hyperparameters": {name: name}, "versions": {name: name}},
            {"algorithm": "c", "run_config": {"dataset": name, "option": {name: 0.5}}},
            {"algorithm": "d", "partition": {"spec": name, "seed": 0, "hash": name}},
        )
    ):
        if place == 0 and not name.isprintable():  # is refused
            continue
        folders[place] = write_run(tmp_path / str(place), **changes)
    text = summary_table(groups_of(*folders.values()))
    assert active(text) == set()
    assert text.count("\n## ") == 3  # a part for each data set and partition


@pytest.mark.parametrize("name", ["/tmp/_a_/b", "__init__", "x _y_ z", "runs/_old/x_", "a (_b_)"])
def test_underscores_stay(name):
    parser = MarkdownIt("commonmark")
    assert re.sub("<[^>]*>", "", parser.renderInline(f"x {name} y")) != f"x {name} y"
    assert re.sub("<[^>]*>", "", parser.renderInline(f"x {inert(name)} y")) == f"x {name} y"


@pytest.mark.parametrize("name", ["client_lr", "_private", "name_", "a_b_c", "a__b__c", "2_3/4_5"])
def test_underscores_within_words_need_no_code(name):
    assert inert(name) == name


@pytest.mark.slow
def test_a_page_of_hostile_names_has_its_own_images_alone(tmp_path):
    for place, name in enumerate(name for name in HOSTILE if name.isprintable()):
        write_run(tmp_path / str(place), algorithm=f"$\\undefined$ {name}")
    page = write_report([tmp_path]).with_suffix(".html").read_text()
    assert re.findall(r"<a href=\"([^#][^\"]*)", page) == []
    sources = re.findall('<img src="([^"]{5})', page)
    assert set(sources) == {"data:"}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ('=HYPERLINK("https://example.org")', '\'=HYPERLINK("https://example.org")'),
        *(("+1+1", "'+1+1"), ("-2+3", "'-2+3"), ("@SUM(A1)", "'@SUM(A1)"), ("\t=1", "'\t=1")),
        *(("-0.5", "-0.5"), ("+3", "+3"), ("-1e-05", "-1e-05"), ("-inf", "-inf"), ("a=1", "a=1")),
    ],
)
def test_no_cell_is_a_formula_and_numbers_stay(tmp_path, text, shown):
    table = estimates_csv(["method"], [([text], text, Estimate(-0.25, None, 1))])
    _, row = csv.reader(io.StringIO(table))
    assert row == [shown, shown, "-0.25", "", "1"]
    if text.isprintable():
        run = write_run(tmp_path / "a", [0.5], algorithm=text)
        lines = list(csv.DictReader(io.StringIO(format_report([run], "csv"))))
        assert {line["method"] for line in lines} == {shown}
