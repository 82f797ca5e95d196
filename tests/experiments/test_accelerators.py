"""The check of accelerators: its programs have their own names, its page says what is missing."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from experiments.benchmarks import accelerators
from experiments.benchmarks.accelerator_tables import MARK, write

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("target", ["v5e", "h200"])
def test_programs_have_names_of_their_own(target):
    found = accelerators.programs(target)
    assert len({program.key for program in found}) == len(found) > 300
    assert {program.name for program in found} >= set(accelerators.CI)
    from experiments.benchmarks.catalogue_rows import METHODS

    for client_map in ("vmap", "scan", "chunk:5", "shard_map", "pmap"):
        assert {f"{name} {client_map}" for name in METHODS} <= {p.name for p in found}


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
    "seconds": 2.0,
    "code": 2**20,
    "arguments": 2**21,
    "temporaries": 0,
    "memory": 3 * 2**20,
    "estimated": 6 * 2**20,
    "bytes_accessed": 5 * 10**8,
    "collectives": {},
}


def test_the_page_has_the_figures_and_what_was_not_run(tmp_path):
    page, file = tmp_path / "page.md", tmp_path / "rows.json"
    page.write_text(f"# Title\n\n{MARK}\nstale\n", encoding="utf-8")
    slower = {**ROW, "name": "scaffold vmap", "seconds": 3.0}
    scan = {**ROW, "name": "fedavg scan", "seconds": 4.0}
    chunk = {**ROW, "group": "runs", "name": "chunk"}
    several = {"name": "fedavg shard_map", "collectives": {"all-reduce": [2, 1500]}}
    several = {**ROW, **several, "target": "v5e:2x2"}
    refused = {"target": "v5e", "group": "models", "name": "big", "error": "RESOURCE_EXHAUSTED"}
    all_rows = (ROW, several, slower, scan, chunk, refused)
    rows = {f"{row['target']} | {row['group']} | {row['name']}": row for row in all_rows}
    write(rows, [*((row["group"], key) for key, row in rows.items()), ("runs", "v5e | runs | x")],
          page, file)  # fmt: skip
    text = page.read_text(encoding="utf-8")
    assert "stale" not in text
    assert "### v5e: vmap · scan\n\nFedAvg's compile: vmap 2 s, scan 4 s." in text
    assert "| fedavg | 1.0 · 1.0 | 1.0 · 1.0 | 0.0 · 0.0 | 2.00 · 2.00 | 0.50 · 0.50 |" in text
    assert "| scaffold | 1.5 · - | 1.0 · - | 0.0 · - | 2.00 · - | 0.50 · - |" in text
    assert "| fedavg | 1.0 | 1.0 | 0.0 | 2.00 | 0.50 | 2 all-reduce: 1.50 d |" in text
    assert "| chunk | v5e |  | 2 (1.0) | 1.0 | 2.0 | 0.0 | 2.00 | 0.50 | none |" in text
    assert "does not compile: RESOURCE_EXHAUSTED" in text
    assert "Not run: 1 of these programs (1 for v5e)." in text
    assert json.loads(file.read_text(encoding="utf-8")) == list(rows.values())
    page.write_text("no mark")
    with pytest.raises(ValueError, match="has no line"):
        write(rows, [], page, file)


def test_a_later_row_takes_the_place_of_an_earlier_one(tmp_path):
    file = tmp_path / "rows.jsonl"
    assert accelerators.read_rows(file) == {}
    file.write_text("".join(json.dumps({**ROW, "seconds": s}) + "\n" for s in (1, 2)))
    (row,) = accelerators.read_rows(file).values()
    assert row["seconds"] == 2
