"""The zoo: losses with other forms of their operations agree with those without; the table."""

import dataclasses

import jax
import numpy as np
import pytest

from experiments.benchmarks import zoo
from fedjax_lab import data
from fedjax_lab.models.lowering import lowered

SMALL = {
    "volume_cnn": {"shape": (4, 4, 4, 1)},
    "text_cnn": {"shape": (6,)},
    "lstm": {"shape": (4,), "label_shape": (4,)},
    "gru": {"shape": (4,), "label_shape": (4,)},
    "resnet18": {"blocks": ((1, 1), (2, 2))},
    "resnet20": {"blocks": ((1, 1), (2, 2))},
    "vgg11": {"blocks": ((1, 1), (2, 2))},
    "mobilenet": {"blocks": ((1, 1), (2, 2))},
    "vit": {"blocks": ((1, 1),)},
    "unet": {"shape": (8, 8, 3), "label_shape": (8, 8)},
}


def small(name):
    """The network with few pixels or words and narrow layers."""
    sizes = {"shape": (8, 8, 3), "width": 8, **SMALL.get(name, {})}
    return dataclasses.replace(zoo.ZOO[name], **sizes)


SLOW = ("resnet18", "resnet20", "mobilenet")
NAMES = [
    pytest.param(name, marks=pytest.mark.slow if name in SLOW else pytest.mark.methods)
    for name, network in zoo.ZOO.items()
    if network.package == "flax" and not name.endswith("_characters")  # "lstm" and "gru", larger
]


@pytest.mark.parametrize("name", NAMES)
def test_other_forms_agree_with_those_of_lax(name):
    network = small(name)
    params, apply = network.build(network)
    examples = zoo.noise(network, 2)
    loss_fn = zoo.build_loss(network, apply)

    @jax.jit
    def run(params, examples):
        def of(loss_fn):
            losses = loss_fn(params, examples, None)
            return losses, jax.grad(lambda p: loss_fn(p, examples, None).sum())(params)

        return of(loss_fn), of(lowered(loss_fn))

    expected, got = map(jax.tree.leaves, run(params, data.Examples(*map(np.asarray, examples))))
    assert expected[0].shape == (2,)
    scale = max(float(abs(leaf).max()) for leaf in expected)
    for theirs, ours in zip(expected, got, strict=True):
        np.testing.assert_allclose(ours, theirs, 1e-4, 1e-5 * scale)


def answer(*milliseconds, **more):
    return {"milliseconds": list(milliseconds), "peak_bytes": 300_000_000, **more}


def test_the_table_is_made_of_stored_measurements():
    """Ratios are of one repeat; what has no measurement says why."""
    ours = [answer(100.0, 120.0, 80.0, first_row_seconds=s) for s in (3.0, 5.0)]
    systems = {"fedjax_lab": ours, "lax": [answer(1000.0)], "torch": [answer(200.0), answer(400.0)]}
    failed = {"fedjax_lab": ours[:1], "torch": [{"status": "not installed: torch"}]}
    found = {
        "networks": {
            "one": {"title": "One", "systems": systems},
            "two": {"title": "Two", "systems": failed},
        }
    }
    head, _, one, two = zoo.table(found).splitlines()
    assert head.startswith("| network | torch / fedjax_lab |")
    assert one == ("| One | 3.00 (2.00 to 4.00) | 10.00 | 100.0 | 300.0 | 4.0 | 300 | 300 |")
    assert two == "| Two | - | - | 100.0 | not installed: torch | 3.0 | 300 | - |"


def test_parameters_are_counted_without_computing_them():
    """Two convolutions and three dense layers, counted by hand."""
    convolutions = 3 * 25 * 16 + 16 + 16 * 25 * 32 + 32
    dense = 8 * 8 * 32 * 120 + 120 + 120 * 84 + 84 + 84 * 10 + 10
    assert zoo.count_params(zoo.ZOO["linen_cnn"]) == convolutions + dense
