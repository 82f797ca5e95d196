"""What a release checks before it builds, and the files that hosts of repositories read."""

import re
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from fedjax_lab import __version__

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(Path(__file__).parent))
import release  # noqa: E402

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PYTHONS = ["3.11", "3.12", "3.13", "3.14"]


@pytest.mark.parametrize(
    ("tag", "version", "heads", "words"),
    [
        ("v0.4.0", "0.4.0", "## 0.4.0\n", ""),
        ("v0.4.1", "0.4.0", "## 0.4.0\n", "the tag is v0.4.1"),
        ("v0.4.0.dev0", "0.4.0.dev0", "## 0.4.0.dev0\n", "is no release"),
        ("v0.4.0", "0.4.0", "## 0.4.0 (unreleased)\n", "no head '## 0.4.0'"),
    ],
)
def test_a_tag_is_released_if_version_and_changelog_agree(tag, version, heads, words):
    problem = release.problem_of(tag, version, "# Changelog\n\n" + heads)
    assert words in problem if words else problem == ""


def test_addresses_come_from_the_repository_alone():
    assert release.urls("") == ""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert "urls" not in PROJECT
    named = tomllib.loads(text + release.urls("https://host.example/owner/name/"))["project"][
        "urls"
    ]
    assert named["Source"] == "https://host.example/owner/name"
    assert named["Issues"] == "https://host.example/owner/name/issues"


def test_every_python_that_is_allowed_is_tested_and_named():
    assert PROJECT["requires-python"] == ">=3.11,<3.15"
    named = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if "Python :: 3." in c]
    assert named == PYTHONS
    tests = workflow("tests")["jobs"]["pythons"]["strategy"]["matrix"]["python"]
    assert tests == PYTHONS
    assert "3.11 to 3.14" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["tests", "docs", "release"])
def test_workflows_do_what_the_makefile_has(name):
    """Each of their commands is a target of the Makefile, or CI's own script."""
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    commands = [
        step["run"]
        for job in workflow(name)["jobs"].values()
        for step in job["steps"]
        if "run" in step
    ]
    assert commands
    for command in commands:
        first, _, rest = command.partition(" ")
        assert first == ".ci/run" or (first == "make" and rest.split()[0] in targets), command


def test_make_help_names_every_target():
    makefile = (ROOT / "Makefile").read_text()
    phony = re.findall(r"^\.PHONY:((?:.*\\\n)*.*)$", makefile, re.MULTILINE)
    targets = re.findall(r"(?<=\s)[a-z][a-z-]*", " ".join(phony))
    listed = "\n".join(re.findall(r"^## make (.*)$", makefile, re.MULTILINE))
    assert "test-gpu" in targets
    assert [name for name in targets if not re.search(rf"(^|, ){name}\b", listed, re.M)] == []


def test_forms_ask_for_what_a_method_needs():
    form = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE/method.yml").read_text())
    assert {"paper", "equations", "code"} <= {field["id"] for field in form["body"]}


def test_it_can_be_cited():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["license"] == PROJECT["license"]
    page = (ROOT / "docs/guides/get_results_out.md").read_text(encoding="utf-8")
    author = cited["authors"][0]["name"].replace("_", r"\_")
    assert f"author = {{{{{author}}}}}" in page
    assert re.search(r"year = \{20\d\d\}", page)
    assert f"version = {{{__version__.partition('.dev')[0]}}}" in page


def test_the_version_has_its_changes_and_a_page_for_those_who_move():
    heads = re.findall(r"^## (\d\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    here = __version__.partition(".dev")[0]
    assert heads[0] == here
    before = next(head for head in heads if head.rsplit(".", 1)[0] != here.rsplit(".", 1)[0])
    page = f"from_{'_'.join(before.split('.')[:2])}.md"
    text = (ROOT / "docs" / "moving" / page).read_text(encoding="utf-8")
    assert f"with version {here}" in text


def workflow(name):
    return yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())
