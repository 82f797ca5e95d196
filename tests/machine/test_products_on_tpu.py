"""Products in float32 on a TPU, which rounds to bfloat16 unless a program says otherwise.

The loss here has no product, so that every product of a round is the library's own.
"""

import re

import jax
import jax.numpy as jnp
import pytest

from fedjax_lab import algorithms, build_round, models, qp, tree, with_compression
from fedjax_lab.machine.target import named, tracing_for
from fedjax_lab.qp.gram import inner_products
from tests.algorithms.problem import initial_params, to_batch
from tests.reference.problem import make_rounds

SLOW = pytest.mark.slow


def elementwise_loss(params, examples, key):
    distance = sum(jnp.square(leaf).sum() for leaf in jax.tree.leaves(params))
    first = jax.tree.leaves(examples)[0]
    return distance + jnp.square(first.astype(jnp.float32)).reshape(first.shape[0], -1).sum(1)


def products(function, *arguments):
    """The products in a program's text for a TPU."""
    with tracing_for(named("v5e")):
        lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("tpu",))
    lines = lowered.as_text().splitlines()
    return [line for line in lines if re.search(r"stablehlo\.(dot_general|convolution)", line)]


def is_exact(line):
    """In full precision, or of narrower numbers, whose products float32 holds."""
    operands, _, result = line.rpartition("->")
    is_narrow = not re.search(r"tensor<[^>]*xf32>", operands) and "bf16" not in result
    return line.count("HIGHEST") == 2 or is_narrow


METHODS = {
    "fedavg": {},
    "scaffold": {},
    "fedmoswa": {},
    "fedspeed": {},
    "feddyn": {},
    "mime": {"momentum": 0.9},
    "fedgamma": {"perturbation_radius": 0.1},
    "fafed": {"momentum": 0.1, "second_moment_decay": 0.9},
}


def build(name):
    if name == "cfedavg":
        return algorithms.cfedavg(elementwise_loss, client_lr=0.1, compressor="top_k:0.9")
    return algorithms.ALGORITHMS[name](elementwise_loss, client_lr=0.1, **METHODS[name])


@pytest.mark.parametrize(
    "name",
    ["fedavg", *(pytest.param(n, marks=SLOW) for n in ("cfedavg", *METHODS) if n != "fedavg")],
)  # fmt: skip
def test_a_rounds_own_products_are_exact(name):
    algorithm = build(name)
    batch = to_batch(
        make_rounds(rounds=1, cohort_size=4, max_steps=2, batch_size=3, seed=3)[0][1], 0
    )
    state = algorithm.init(initial_params(), 10)
    found = products(build_round(algorithm, "vmap"), state, batch)
    assert found  # the weighted sums, at least
    assert [line for line in found if not is_exact(line)] == []


def test_weighted_sums_are_exact():
    found = products(tree.weighted_sum, {"a": jnp.ones((20, 50))}, jnp.ones(20))
    assert found
    assert all(map(is_exact, found))


def test_a_gram_matrix_and_a_projection_are_sums_without_products():
    rows = {"a": jnp.ones((20, 50))}
    assert products(inner_products, rows, rows) == []
    p, rows = jnp.ones(50), jnp.ones((20, 50))
    found = products(lambda p, rows: qp.project_to_cone(p, rows)[0], p, rows)
    assert [line for line in found if not is_exact(line)] == []


def test_many_rows_are_multiplied_in_parts_of_bfloat16():
    rows = {"a": jnp.ones((40, 5000)), "b": jnp.ones((40, 50))}
    (found,) = products(inner_products, rows, rows)  # of the long leaf alone
    assert re.search(r"\(tensor<120x5000xbf16>, tensor<.*bf16>\) -> tensor<.*xf32>", found)


def test_low_rank_messages_are_exact():
    algorithm = with_compression(
        algorithms.fedavg(elementwise_loss, client_lr=0.1), "low_rank:2", scope="global"
    )
    batch = to_batch(
        make_rounds(rounds=1, cohort_size=4, max_steps=2, batch_size=3, seed=3)[0][1], 0
    )
    state = algorithm.init(initial_params(), 10)
    found = products(build_round(algorithm, "vmap"), state, batch)
    assert [line for line in found if not is_exact(line)] == []


def test_a_models_products_are_the_hardwares_unless_jax_is_told():
    model = models.lenet5(10, widths=(4, 4, 8, 8))
    x = jnp.ones((2, 32, 32, 3))
    params = jax.jit(model.init)(jax.random.key(0), x)
    assert not any(map(is_exact, products(model.apply, params, x)))
    with jax.default_matmul_precision("float32"):
        found = products(model.apply, params, x)
    assert len(found) == 5
    assert all(map(is_exact, found))
