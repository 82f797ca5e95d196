"""The check of accelerators: its programs have their own names, its page says what is missing."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from experiments.benchmarks import accelerators
from experiments.benchmarks.accelerators import MARK, write

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("target", ["v5e", "h200"])
def test_programs_have_names_of_their_own(target):
    found = accelerators.programs(target)
    assert len({program.key for program in found}) == len(found) > 300
    assert {program.name for program in found} >= set(accelerators.CI)
    for client_map in ("vmap", "scan", "chunk:5", "shard_map", "pmap"):
        assert {f"{name} {client_map}" for name in accelerators.METHODS} <= {p.name for p in found}


def test_the_gpu_plugin_that_users_install_is_the_one_that_was_measured():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extra,) = project["optional-dependencies"]["cuda"]
    (cuda,) = re.findall(r"cuda\d+", extra)
    for name in ("Makefile", "constraints.txt", "docs/speed.md"):
        plugins = re.findall(r"\bjax-(cuda\d+)-plugin", (ROOT / name).read_text())
        assert set(plugins) == {cuda}, name


ROW = {
    "target": "v5e",
    "group": "methods",
    "name": "fedavg vmap",
    "model_bytes": 1000,
    "code": 2**20,
    "arguments": 2**21,
    "temporaries": 2**20,
    "memory": 3 * 2**20,
    "collectives": {},
}


def test_the_page_has_the_figures_and_what_was_not_run(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"# Title\n\n{MARK}\nstale\n", encoding="utf-8")
    other = {**ROW, "name": "scaffold vmap", "temporaries": 3 * 2**20}
    scan = {**ROW, "name": "fedavg scan", "temporaries": 2**19}
    chunk = {**ROW, "group": "runs", "name": "chunk"}
    several = {"name": "fedavg shard_map", "collectives": {"all-reduce": [2, 1500]}}
    several = {**ROW, **several, "target": "v5e:2x2"}
    refused = {"target": "v5e", "group": "models", "name": "big", "error": "RESOURCE_EXHAUSTED"}
    all_rows = (ROW, several, other, scan, chunk, refused)
    rows = {f"{row['target']} | {row['group']} | {row['name']}": row for row in all_rows}
    planned = [*((row["group"], key) for key, row in rows.items()), ("runs", "v5e | runs | x")]
    write(rows, planned, page)
    text = page.read_text(encoding="utf-8")
    assert "stale" not in text
    assert "## Methods\n\nCompiled: 3 of 3 for v5e, 1 of 1 for v5e:2x2." in text
    assert "### One device\n\n| method | v5e, MiB: vmap · scan |" in text
    assert "| fedavg | 1.0 · 0.5 |" in text
    assert "| scaffold | 3.0 · - |" in text
    assert "| fedavg | 1.0 | 2 all-reduce: 1.50 d |" in text
    assert text.count("| scaffold |") == 1  # no line in the table of several devices
    assert "| chunk | 2.0 + 1.0 |" in text
    assert "Compiled: 0 of 1 for v5e." in text
    assert "does not compile: RESOURCE_EXHAUSTED" in text
    assert "Not run: 1 of these programs (1 for v5e)." in text
    page.write_text("no mark")
    with pytest.raises(ValueError, match="has no line"):
        write(rows, [], page)


def test_the_page_is_made_of_the_rows():
    rows = accelerators.read_rows(ROOT / accelerators.ROWS)
    page = (ROOT / accelerators.PAGE).read_text(encoding="utf-8").partition(MARK)[2]
    for title, targets in accelerators.ON_PAGE.items():
        of_title = page.partition(f"### {title}\n")[2].partition("##")[0]
        (line,) = (line for line in of_title.splitlines() if line.startswith("| scaffold |"))
        for target in targets:
            row = rows[f"{target} | methods | scaffold {'shard_map' if ':' in target else 'vmap'}"]
            assert f"| {row['temporaries'] / 2**20:.1f} · " in line, target


def test_a_later_row_takes_the_place_of_an_earlier_one(tmp_path):
    file = tmp_path / "rows.jsonl"
    assert accelerators.read_rows(file) == {}
    file.write_text("".join(json.dumps({**ROW, "code": n}) + "\n" for n in (1, 2)))
    (row,) = accelerators.read_rows(file).values()
    assert row["code"] == 2
