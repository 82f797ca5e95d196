"""What programs written for version 0.3.0 import and call is there, and takes the same arguments.

``public_names_0_3_0.json`` has every public name of that version with its arguments; "?" marks
those that had a default. A name or an argument that is taken away on purpose leaves the file, and
the changelog says what to do.
"""

import importlib
import inspect
import json
from pathlib import Path

import pytest

BEFORE = json.loads(Path(__file__).with_name("public_names_0_3_0.json").read_text())


@pytest.mark.parametrize("room", sorted({name.rpartition(".")[0] for name in BEFORE}))
def test_names_and_arguments_are_those_of_0_3_0_or_more(room):
    module = importlib.import_module(".".join(filter(None, ("fedjax_lab", room))))
    for name, before in BEFORE.items():
        place, _, short = name.rpartition(".")
        if place != room:
            continue
        assert short in module.__all__, name
        if before is None:
            continue
        now = inspect.signature(getattr(module, short)).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in now.values())
        given = {argument.rstrip("?") for argument in before}
        assert takes_any or given <= now.keys(), (name, given - now.keys())
        needed = {p.name for p in now.values() if p.default is p.empty and p.kind < p.VAR_KEYWORD}
        needed -= {p.name for p in now.values() if p.kind is p.VAR_POSITIONAL}
        assert needed <= {argument for argument in before if "?" not in argument}, name
        first = [p.name for p in now.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        old = [argument.rstrip("?") for argument in before]
        places = [old.index(argument) for argument in first if argument in old]
        assert places == sorted(places), name  # calls by position mean what they meant
