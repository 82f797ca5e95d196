"""What ``@factory`` makes of a function: signature, docstring, checks, recorded arguments."""

import inspect
import re
import sys
import unicodedata
from typing import Unpack, get_type_hints

import jax.numpy as jnp
import optax
import pytest

from fedjax_lab.algorithms import ALGORITHMS
from fedjax_lab.algorithms.factory import RUN_ARGUMENTS, Common, LocalTraining, factory
from fedjax_lab.clients.local import Gradient, local_steps
from fedjax_lab.data.cohort import Schedule
from fedjax_lab.round import Algorithm, Phase

EMPTY = inspect.Parameter.empty
OPTIONAL = [name for name in Common.__annotations__ if name in Common.__optional_keys__]
each_method = pytest.mark.parametrize("name", ALGORITHMS)


def described(doc):
    """Argument -> its description in one line, of the section Args."""
    (section,) = re.findall(r"^Args:\n((?:  .*\n)+)", doc, re.M)
    entries = re.split(r"\n(?=  \w)", section.rstrip())
    pairs = (entry.partition(":")[::2] for entry in entries)
    return {name.strip(): " ".join(text.split()) for name, text in pairs}


def required(name):
    """A value for every required argument of a method; none of them is looked at."""
    parameters = inspect.signature(ALGORITHMS[name]).parameters.values()
    return {p.name: None for p in parameters if p.default is EMPTY}


def no_loss(params, examples, key):
    raise AssertionError("a factory calls no loss")


def method(loss_fn, *, server_lr=0.5, decay=0.9, **common: Unpack[Common]) -> Algorithm:
    """A method.

    Args:
      decay: in [0, 1].
    """
    training = LocalTraining(loss_fn, **common)
    phase = Phase(None, training.client_update, None, reduce={"delta": "mean"})
    return Algorithm("method", None, (phase,), None)


@each_method
def test_signatures_are_whole(name):
    parameters = inspect.signature(ALGORITHMS[name]).parameters
    kinds = {p.kind for p in parameters.values()}
    assert kinds == {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
    assert parameters["client_lr"].kind is inspect.Parameter.KEYWORD_ONLY
    assert parameters["client_lr"].default is EMPTY
    assert parameters["gradient_transform"].kind is inspect.Parameter.KEYWORD_ONLY
    assert parameters["gradient_transform"].default is None
    assert Common.__annotations__.keys() <= parameters.keys()
    hints = get_type_hints(ALGORITHMS[name])
    assert hints.pop("return") is Algorithm
    assert hints == {p.name: p.annotation for p in parameters.values()}


@each_method
def test_docstrings_are_whole(name):
    parameters = inspect.signature(ALGORITHMS[name]).parameters
    doc = inspect.getdoc(ALGORITHMS[name])
    texts = described(doc)
    assert list(texts) == list(parameters)
    assert all(texts.values())
    for argument, text in texts.items():
        for default in re.findall(r"(\S+) by default", text):
            assert default == str(parameters[argument].default)
    assert doc.count("\nRaises:\n") == 1


@each_method
def test_wrong_keywords_are_named(name):
    build, arguments = ALGORITHMS[name], required(name)
    with pytest.raises(TypeError, match=rf"{name}\(\) .*unexpected keyword argument 'clent_lr'"):
        build(**arguments, clent_lr=0.1)
    for missing in arguments:
        rest = {key: value for key, value in arguments.items() if key != missing}
        with pytest.raises(TypeError, match=rf"{name}\(\) missing .*'{missing}'"):
            build(**rest)


WITHOUT_SYMBOL = {"client_lr", "server_lr"}  # "eta", "eta_l" and "eta_g" mean them everywhere
WITHOUT_SYMBOL |= {"control_update", "normalize_by_steps"}  # rows of words, not of symbols
WITHOUT_SYMBOL |= {"anchor", "compressor", "fine_tune", "head", "personal", "table"}


def symbol_rows(doc):
    """(symbols in Latin letters, names in the right column) of each row of a file's table."""
    rows = re.split(r"^=+ +=+ *$", doc, flags=re.M)
    if len(rows) == 4:
        for row in rows[2].strip().splitlines():
            left, _, right = row.partition("  ")
            found = re.findall(r"(?:1/)?[^\W\d_](?:_\w)?", re.sub(r"\(.*?\)", "", left))
            yield {_in_latin(symbol) for symbol in found}, set(re.findall(r"``(\w+)``", right))


def _in_latin(symbol):
    names = re.sub(r"[\u0370-\u03ff]", lambda x: unicodedata.name(x[0]).split()[-1].lower(), symbol)
    return names.replace("lamda", "lambda")


FILES = {inspect.getmodule(build.__wrapped__).__name__ for build in ALGORITHMS.values()}


@pytest.mark.parametrize("file", sorted(FILES))
def test_symbols_are_those_of_the_table(file):
    module = sys.modules[file]
    methods = [b for b in ALGORITHMS.values() if b.__wrapped__.__module__ == file]
    arguments = {name for build in methods for name in inspect.signature(build).parameters}
    rows = list(symbol_rows(module.__doc__))
    pairs = {
        (symbol, name)
        for symbol, names in getattr(module, "SYMBOLS", {}).items()
        for name in ([names] if isinstance(names, str) else names)
    }
    for symbol, name in pairs:
        assert name in arguments
        assert any(symbol in symbols and name in names for symbols, names in rows)
    named = {name for symbols, names in rows for name in names & arguments - symbols}
    assert named - WITHOUT_SYMBOL <= {name for _, name in pairs}


def test_own_words_count_first():
    assert described(ALGORITHMS["stem"].__doc__)["client_lr"].startswith("η_t")
    assert described(ALGORITHMS["fedavg"].__doc__)["server_lr"].endswith("1 is plain averaging.")


def test_shared_words():
    texts = described(factory(method).__doc__)
    assert list(texts) == ["loss_fn", "client_lr", "server_lr", "decay", *OPTIONAL]
    assert texts["client_lr"] == "local learning rate, or a schedule of the round."
    assert texts["server_lr"] == "server learning rate, or a schedule of the round; 0.5 by default."
    assert described(ALGORITHMS["fedadagrad"].__doc__)["server_lr"].endswith("of the round.")


def test_docstrings_of_other_shapes():
    def bare(loss_fn, **common: Unpack[Common]):
        """Short.

        Example:
            bare(loss_fn, client_lr=0.1)
        """

    def deep(loss_fn, *, a, b, c, **common: Unpack[Common]):
        """Short.

        Args:
            a, b: numbers,
                both of them.

            c: another.

        Raises:
            ValueError: rarely.
        """

    def silent(loss_fn, **common: Unpack[Common]):
        pass

    assert list(described(factory(bare).__doc__)) == ["loss_fn", "client_lr", *OPTIONAL]
    assert "Example:\n    bare(" in factory(bare).__doc__
    texts = described(factory(deep).__doc__)
    assert list(texts) == ["loss_fn", "client_lr", "a, b", "c", *OPTIONAL]
    assert texts["a, b"] == "numbers, both of them."
    assert factory(deep).__doc__.endswith("Raises:\n    ValueError: rarely.")
    assert factory(silent).__doc__ is None
    assert factory(silent).__annotations__ == get_type_hints(Common)


def test_learning_rates_are_checked():
    for name in ("client_lr", "server_lr"):
        with pytest.raises(ValueError, match=f"{name} is -1"):
            factory(method)(no_loss, **({"client_lr": 0.1} | {name: -1}))
    with pytest.raises(ValueError, match="client_lr is -1"):
        LocalTraining(None, client_lr=-1)


def test_arguments_are_recorded():
    made = factory(method)(no_loss, client_lr=optax.constant_schedule(0.1), decay=jnp.ones(()))
    recorded = [name for name in OPTIONAL if not name.startswith("example_")]
    assert list(made.hyperparameters) == ["client_lr", "server_lr", "decay", *recorded]
    constant = {"function": "optax.constant_schedule", "arguments": {"value": 0.1}}
    assert made.hyperparameters["client_lr"] == constant
    assert made.hyperparameters["server_lr"] == 0.5
    assert made.hyperparameters["decay"] == 1.0
    assert made.hyperparameters["gradient_transform"] is None


def test_arguments_of_a_run_are_known():
    assert set(Schedule._fields) <= set(RUN_ARGUMENTS)


def test_arguments_may_be_written_out():
    """A factory that names every argument itself is left as it is, but for the record."""

    def written(loss_fn, *, client_lr, server_lr=None, gradient_transform=None):
        """Short."""
        gradient = Gradient(loss_fn, gradient_transform)

        def client_update(x, row, batch):
            return local_steps(gradient, gradient, x, batch, client_lr)

        phase = Phase(None, client_update, None, reduce={"delta": "mean"})
        return Algorithm("written", None, (phase,), None)

    made = factory(written)
    assert made.__doc__ == "Short."
    assert inspect.signature(made) == inspect.signature(written)
    recorded = {"client_lr": 0.1, "server_lr": None, "gradient_transform": None}
    assert made(no_loss, client_lr=0.1).hyperparameters == recorded
    with pytest.raises(TypeError, match=r"written\(\) missing .*'client_lr'"):
        made(no_loss)
