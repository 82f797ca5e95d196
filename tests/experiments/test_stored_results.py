"""Stored results: whole, of today's code, and what discussions say of them."""

import functools
import importlib
import json

import pytest

from experiments.studies import numbers
from experiments.studies.fingerprint import fingerprint, is_same, specification

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


@pytest.mark.parametrize("name", ["fedavg", "gradma_s", "fedmoswa", "fafed"])
def test_a_stored_method_computes_what_it_computed(name):
    check(min(text for text in specified() if json.loads(text).get("algorithm") == name))


@pytest.mark.methods
def test_all_stored_methods_compute_what_they_computed():
    for text in specified():
        check(text)


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
def test_each_number_of_a_discussion_stands_in_the_results(paper):
    assert numbers.check(paper) == []


def test_a_number_that_the_page_does_not_have_is_found():
    page = "| A | 81.92 ± 0.13 | 1,200 |"
    assert numbers.missing(page, "81.9, 82 and 81.92 ± 0.13 in 1,200 rounds") == []
    lost = numbers.missing(page, "81.8 in 1,201 rounds, 81.9 ± 0.2")
    assert lost == ["81.8", "1201", "0.2", "81.9 ± 0.2"]
    assert numbers.missing(page, "81.923") == ["81.923"]
    assert numbers.missing(page, "7 and 0.1 ± 81.9", elsewhere=("7",)) == ["0.1 ± 81.9"]
