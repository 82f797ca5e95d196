"""Short compilations: the same values, inside other programs too; never of rounds."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_lab import algorithms, data, models, simulate
from fedjax_lab.machine import quick
from fedjax_lab.machine.quick import quick_jit, quick_options, without_collection

ONLY_BEFORE_0_11 = pytest.mark.skipif(
    jax.__version_info__ >= (0, 11), reason="JAX 0.11's compiler has no such option"
)


@pytest.fixture
def compiled_with(monkeypatch):
    """The options of programs that are lowered and compiled by hand, as rounds are."""
    seen = []
    compile = jax.stages.Lowered.compile

    def spy(self, compiler_options=None):
        seen.append(compiler_options)
        return compile(self, compiler_options)

    monkeypatch.setattr(jax.stages.Lowered, "compile", spy)
    return seen


@pytest.fixture
def another_compiler(monkeypatch):
    """A compiler that does not know the option."""
    monkeypatch.setattr(quick, "_EMITTERS", "xla_cpu_no_such_option")
    quick._is_known.cache_clear()
    yield
    quick._is_known.cache_clear()


@ONLY_BEFORE_0_11
def test_the_option_turns_the_emitters_off():
    assert quick_options() == {"xla_cpu_use_fusion_emitters": False}


def test_there_is_none_where_the_compiler_refuses_it(another_compiler):
    assert quick_options() is None
    np.testing.assert_array_equal(quick_jit(jnp.cumsum)(jnp.arange(4)), [0, 1, 3, 6])


def test_there_is_none_on_accelerators(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert quick_options() is None


def test_inside_other_programs():
    square = quick_jit(lambda x: (x * x).sum())
    x = jnp.arange(3.0)
    assert square(x) == 5
    assert jax.jit(square)(x) == 5
    assert jax.jit(lambda: square(x))() == 5  # nothing in the call is traced
    np.testing.assert_array_equal(jax.grad(square)(x), [0, 2, 4])
    np.testing.assert_array_equal(jax.vmap(square)(x[:, None]), [0, 1, 4])
    assert jax.eval_shape(square, x).shape == ()


def test_a_model_is_drawn_with_the_same_bits_inside_a_program():
    model = models.build("linear", num_classes=3)
    key, x = jax.random.key(0), jnp.zeros((1, 4))
    alone, inside = model.init(key, x), jax.jit(lambda: model.init(key, x))()
    jax.tree.map(np.testing.assert_array_equal, alone, inside)


def test_rounds_are_compiled_with_the_compilers_defaults(compiled_with):
    train = data.Examples(np.eye(8, dtype=np.float32), np.arange(8, dtype=np.int32) % 3)
    clients = data.partition(train, "iid", num_clients=2, seed=0)
    model = models.build("linear", num_classes=3)
    loss_fn = models.classification_loss(model.apply)
    params = model.init(jax.random.key(0), train.x[:1])
    compiled_with.clear()
    plan = {"rounds": 1, "cohort_size": 1, "local_steps": 1, "batch_size": 2}
    simulate(algorithms.fedavg(loss_fn, client_lr=0.1), params, clients, **plan)
    assert compiled_with == [None]


@pytest.mark.parametrize("was_on", [True, False])
def test_collection_pauses_for_a_call_and_is_then_as_before(was_on):
    @without_collection()
    def fails():
        assert not gc.isenabled()
        raise ArithmeticError

    before = gc.isenabled()
    try:
        (gc.enable if was_on else gc.disable)()
        with pytest.raises(ArithmeticError):
            fails()
        assert gc.isenabled() == was_on
    finally:
        (gc.enable if before else gc.disable)()
