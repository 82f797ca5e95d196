"""Stored results: whole, of today's code, and what discussions say of them."""

import functools
import importlib
import json
import random
import re

import numpy as np
import pytest
from scipy import stats

from experiments.studies import numbers
from experiments.studies.fingerprint import fingerprint, is_same, specification
from tests.tiers import few

PAPERS = ("catalogue", "cfedavg", "fafed", "fedspeed", "fedswa", "gradma")


@functools.cache
def stored():
    """(study, column's name, method's name, settings of the column, cell) of all stored cells."""
    found = []
    for paper in PAPERS:
        for study in importlib.import_module(f"experiments.{paper}.__main__").STUDIES:
            path = study.result_path(numbers.ROOT / paper)
            result = json.loads(path.read_text(encoding="utf-8"))
            for name, column in result["columns"].items():
                for method, cell in column["methods"].items():
                    found.append((study, name, method, column["settings"], cell))
    return found


def specified():
    """What determines a fingerprint -> the cells that have it."""
    found = {}
    for study, column, method, _, cell in stored():
        text = specification(study.methods[method], study.scales["machine"].columns[column])
        place = f"{study.name}, {column}, {method}"
        assert (text is None) == (cell["code"]["fingerprint"] is None), place
        if text is not None:
            found.setdefault(text, []).append((place, cell["code"]["fingerprint"]))
    return found


def check(text):
    now = fingerprint(text)
    for place, then in specified()[text]:
        assert is_same(then, now), f"{place} was made by code that computes something else."


def test_every_stored_run_is_whole():
    for study, column, method, settings, cell in stored():
        place = f"{study.name}, {column}, {method}"
        assert len({run["seed"] for run in cell["runs"]}) >= 3, place
        for run in cell["runs"]:
            curves = run["curves"]
            assert run["stopped"] in (None, "diverged"), place
            if run["stopped"] is None:
                assert curves["round"][-1] == settings["rounds"], place
                assert curves["accuracy"][-1] is not None, place
            else:
                assert curves.get("accuracy", [None])[-1] is None, place


def test_every_stored_cell_names_its_version():
    for study, column, method, _, cell in stored():
        assert cell["code"]["fedjax_lab"] >= "0.3.0", f"{study.name}, {column}, {method}"


@pytest.mark.parametrize("name", few(1, ["gradma_s", "fedavg", "fedmoswa", "fafed"]))
def test_a_stored_method_computes_what_it_computed(name):
    check(min(text for text in specified() if json.loads(text).get("algorithm") == name))


@pytest.mark.methods
def test_all_stored_methods_compute_what_they_computed():
    for text in specified():
        check(text)


@pytest.mark.methods
def test_another_method_has_another_fingerprint():
    """FedAvg's own row differs from FedSWA's, and equals FedSWA's with rho = alpha = 1."""
    common = '"client_lr_schedule": "exponential:0.998", "clip_norm": 10.0, "weight_decay": 0.001'
    plain = fingerprint(f'{{"algorithm": "fedavg", "option": {{}}, {common}}}')
    found = [
        fingerprint(
            f'{{"algorithm": "fedswa", "option": {{"final_lr_ratio": {rho}}}, "server_lr": 1.0, '
            f"{common}}}"
        )
        for rho in (1.0, 0.5)
    ]
    assert is_same(plain, found[0])
    assert not is_same(plain, found[1])


@pytest.mark.parametrize("paper", numbers.PAGES)
@pytest.mark.methods
def test_each_number_of_a_discussion_is_one_of_results_or_settings(paper):
    assert numbers.check(paper) == []


@pytest.mark.parametrize("paper", numbers.PAGES)
@pytest.mark.methods
def test_a_number_in_place_of_another_is_found(paper):
    """All fields replaced by random numbers, and all numbers of settings by others."""
    source = (numbers.ROOT / paper / numbers.DISCUSSION).read_text(encoding="utf-8")
    head, text = source.split("-->", 1)
    rng = random.Random(0)
    places = [*re.finditer(r"\{\w+ [\w-]+ [^{}]+\}|(?<![\w.])\d[\d,]*(?:\.\d+)?", text)]
    assert len(places) > 20
    passed = 0
    for place in places:
        other = f"{rng.uniform(0, 100):.{rng.choice((0, 1, 2))}f}"
        changed = f"{head}-->{text[: place.start()]}{other}{text[place.end() :]}"
        passed += other != place.group() and not numbers.unbound(changed)
    assert passed <= 0.05 * len(places)


def test_fields_are_filled_from_the_cells_that_they_name(tmp_path):
    studies = importlib.import_module("experiments.fedswa.__main__").STUDIES
    result = json.loads((numbers.ROOT / "fedswa/results/table_8.json").read_text(encoding="utf-8"))
    cells = result["columns"]["dirichlet_equal:0.1"]["methods"]
    tops, ends = (
        {
            name: np.array([100 * best(run["curves"]["accuracy"]) for run in cells[name]["runs"]])
            for name in ("FedSMOO", "FedMoSWA", "FedGAMMA")
        }
        for best in (max, lambda values: values[-1])
    )
    lead = tops["FedMoSWA"] - tops["FedSMOO"]
    low, high = stats.ttest_1samp(lead, 0).confidence_interval(0.95)
    source = """<!--
eight = table_8 / dirichlet_equal:0.1
settings = Table 8
-->

{eight mean FedMoSWA :3}, {eight mean-last FedSMOO :2}, {eight lead FedMoSWA | FedGAMMA | FedSMOO},
{eight gap FedMoSWA | FedSMOO}, {eight paper FedSMOO} and {eight chosen-client_lr FedSMOO} of
Table 8
"""
    text = numbers.filled(source, studies, numbers.ROOT / "fedswa")
    assert text.split() == [
        *(f"{tops['FedMoSWA'].mean():.3f},", f"{ends['FedSMOO'].mean():.2f},"),
        *(f"{lead.mean():.2f}", "±", f"{(high - low) / 2:.2f},"),
        *(f"{abs(lead.mean()):.1f},", "46.5", "and", "0.1", "of", "Table", "8"),
    ]
    for wrong in ("eight mean FedX", "eight medium FedSMOO", "nine mean FedSMOO"):
        with pytest.raises(ValueError, match=wrong.split()[0]):
            numbers.filled(f"{source}{{{wrong}}}", studies, numbers.ROOT / "fedswa")
    assert numbers.unbound(f"{source} 3.1 in Table 9 and Table 8.5") == ["3.1", "9", "8.5"]
