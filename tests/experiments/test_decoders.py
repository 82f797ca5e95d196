"""The decoders that accelerators' compilers are asked about: sizes, and how chips share them."""

import jax
import pytest

from experiments.benchmarks.decoders import MODELS, divided, method_of

# What the models' own pages say, and r (m + n) of the seven kernels of each layer.
SIZES = {"0.5B": 494_032_768, "1B": 1_235_814_400, "8B": 8_030_261_248}


@pytest.mark.parametrize("name", MODELS)
def test_sizes_are_those_of_the_published_models(name):
    _, adapters, frozen = method_of(MODELS[name])
    assert sum(leaf.size for leaf in jax.tree.leaves(frozen)) == SIZES[name]
    assert {leaf.dtype.name for leaf in jax.tree.leaves(frozen)} == {"bfloat16"}
    c = MODELS[name]
    heads, kv = c.num_heads * c.head_width, c.num_kv_heads * c.head_width
    sides = [c.width + heads, c.width + kv, c.width + kv, heads + c.width]
    sides += [c.width + c.mlp_width] * 3
    assert sum(leaf.size for leaf in jax.tree.leaves(adapters)) == 16 * c.num_layers * sum(sides)


def test_four_chips_share_all_but_the_norms():
    _, adapters, frozen = method_of(MODELS["8B"])
    whole = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(frozen):
        spec = divided(jax.tree_util.keystr(path, simple=True, separator="/"), leaf)
        cut = [n for n, axis in zip(leaf.shape, spec, strict=False) if axis == "model"]
        assert all(n % 4 == 0 for n in cut)
        whole += 0 if cut else leaf.size
    assert whole < 1e-4 * SIZES["8B"]
    for path, leaf in jax.tree_util.tree_leaves_with_path(adapters):
        spec = divided(jax.tree_util.keystr(path, simple=True, separator="/"), leaf)
        assert all(n % 4 == 0 for n, axis in zip(leaf.shape, spec, strict=False) if axis)
