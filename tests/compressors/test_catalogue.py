"""The formulas that the list of compressors prints are those of the code."""

import inspect
import math

import pytest

from fedjax_lab.compressors import COMPRESSORS, as_compressor
from fedjax_lab.compressors.by_name import MESSAGE_BYTES, describe

ARGUMENTS = {"comp": 0.9, "levels": 20, "rank": 3}


@pytest.mark.parametrize("d", [1, 10, 1000, 12345])
@pytest.mark.parametrize("name", sorted(set(COMPRESSORS) - {"compose"}))
def test_the_bytes_are_the_formulas(name, d):
    formula = MESSAGE_BYTES[name].removesuffix(" on average").partition(" with ")[0]
    taken = inspect.signature(COMPRESSORS[name]).parameters
    arguments = {key: value for key, value in ARGUMENTS.items() if key in taken}
    k, n = max(1, round(0.1 * d)), math.floor(math.sqrt(d))
    functions = {"ceil": math.ceil, "log2": math.log2, "min": min}
    size = eval(formula, {}, {"d": d, "k": k, "n": n, **arguments, **functions})
    assert COMPRESSORS[name](**arguments).bytes(d) == round(size)


def test_a_composition_sends_positions_and_codes():
    # 10 of 1,000: indices of 10 bits, then codes of 5 bits and their scale.
    assert as_compressor("compressor", "top_k:0.99+qsgd:15").bytes(1000) == 13 + (7 + 4)


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("qsgd:7:scaled", {"levels": 7, "scaled": True}),
        ("qsgd:scaled", {"levels": 15, "scaled": True}),
        ("terngrad:scaled", {"scaled": True}),
        ("random_k:keep=0.25:rescale", {"comp": 0.75, "rescale": True}),
    ],
)
def test_a_text_can_set_what_is_false_by_default(text, options):
    said = ", ".join(f"{name}={value}" for name, value in options.items())
    assert str(as_compressor("compressor", text)) == f"{text.partition(':')[0]}({said})"


def test_descriptions():
    assert describe("sign")[:2] == ["as text: sign", "arguments in Python: none"]
    assert describe("qsgd")[:2] == [
        "as text: qsgd:LEVELS[:scaled]",
        "arguments in Python: levels=15, scaled=False",
    ]
    assert describe("compose")[0] == "as text: SPARSIFIER+QUANTISER"
