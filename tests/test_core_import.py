"""The core needs jax, flax, optax, chex and numpy, whatever else is installed."""

import subprocess
import sys
import textwrap

PROGRAM = textwrap.dedent(
    """
    import builtins, functools, sys

    allowed = {"fedjax_lab", "jax", "jaxlib", "flax", "optax", "chex", "numpy"}
    allowed |= set(sys.stdlib_module_names)
    real_import = builtins.__import__
    refused = []

    def guarded(name, globals=None, locals=None, fromlist=(), level=0):
        importer = (globals or {}).get("__name__", "")
        top = name.partition(".")[0]
        if importer.partition(".")[0] == "fedjax_lab" and not level and top not in allowed:
            refused.append(f"{importer} imports {name}")
            raise ImportError(refused[-1])
        return real_import(name, globals, locals, fromlist, level)

    builtins.__import__ = guarded

    import jax
    import jax.numpy as jnp
    import fedjax_lab
    from fedjax_lab import algorithms, build_round, data, models

    train, test = data.load("digits")
    clients = data.partition(train, "dirichlet:0.1", num_clients=20, seed=0)
    model = models.build("linear", num_classes=10)
    loss_fn = models.classification_loss(model.apply, data.preprocess(scale=16))
    params = jax.eval_shape(model.init, jax.random.key(0), train.x[:1])
    algorithm = algorithms.gradma(loss_fn, client_lr=0.1, memory_size=20)
    state = jax.eval_shape(lambda params: algorithm.init(params, num_clients=20), params)
    draw = functools.partial(data.draw_batch, cohort_size=2, local_steps=1, batch_size=2)
    batch = jax.eval_shape(draw, clients, jax.random.key(0), 0)
    after, _ = jax.eval_shape(build_round(algorithm, client_map="vmap"), state, batch)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    assert not refused, refused
    loaded = {name.partition(".")[0] for name in sys.modules}
    unwanted = {"tyro", "matplotlib", "tensorflow_datasets", "sklearn", "torch"} & loaded
    unwanted |= {"orbax.checkpoint"} & sys.modules.keys()  # imported when a run is stored or read
    assert not unwanted, unwanted
    print("built")
    """
)


def test_a_round_is_built_with_the_core_packages_alone():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "built\n", done.stderr
