"""Clients as they are: what each holds afterwards is counted from the arrays that went in."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_lab import data
from fedjax_lab.simulation.arguments import nonfinite_data

rng = np.random.default_rng(0)
MINE = {
    "alice": (rng.normal(size=(4, 3)), rng.normal(size=4)),
    "bob": (rng.normal(size=(1, 3)), rng.normal(size=1)),
    17: (rng.normal(size=(9, 3)), rng.normal(size=9)),
    ("a", 1): (rng.normal(size=(2, 3)), rng.normal(size=2)),
}


def held_by(clients, i):
    """The examples of client i, by the definition of ``FederatedArrays``."""
    start, size = int(clients.starts[i]), int(clients.sizes[i])
    places = np.asarray(clients.indices)[start : start + size]
    return jax.tree.map(lambda leaf: np.asarray(leaf)[places], clients.examples)


def rows_of(clients):
    """name -> the set of its examples, each as a tuple of numbers."""
    found = {}
    for i, name in enumerate(clients.names):
        x = held_by(clients, i).x
        found[name] = set(map(tuple, x.tolist()))
    return found


def test_everybody_holds_what_was_given():
    clients = data.from_clients(MINE)
    assert clients.names == ("alice", "bob", "17", "('a', 1)")
    assert isinstance(clients.examples, data.Examples)
    assert clients.examples.x.dtype == clients.examples.y.dtype == jnp.float32
    for i, (x, y) in enumerate(MINE.values()):
        np.testing.assert_array_equal(held_by(clients, i).x, x.astype(np.float32))
        np.testing.assert_array_equal(held_by(clients, i).y, y.astype(np.float32))
    assert (clients.num_clients, clients.min_size, clients.max_size) == (4, 1, 9)
    assert clients.nonempty is None
    assert clients.partition.spec == "natural"
    assert "names: alice, bob, 17" in clients.summary()


@pytest.mark.parametrize(
    "value",
    [
        {"x": np.ones((2, 3)), "y": -np.ones((2, 1, 4), np.int64)},
        [np.ones((2, 3)), {"mask": np.array([True, False])}],
        np.ones((2, 5), np.uint8),
        (np.ones(2), np.ones(2), np.ones(2)),
        data.Examples(jnp.ones((2, 3), jnp.bfloat16), np.arange(2)),
    ],
    ids=["dict", "list", "array", "triple", "examples"],
)
def test_any_pytree_stays_as_it_is(value):
    clients = data.from_clients({0: value, 1: jax.tree.map(lambda leaf: leaf[:1], value)})
    assert jax.tree.structure(clients.examples) == jax.tree.structure(value)
    for leaf, given in zip(
        jax.tree.leaves(held_by(clients, 0)), jax.tree.leaves(value), strict=True
    ):
        np.testing.assert_array_equal(leaf, given)


def test_empty_clients_are_never_drawn():
    mine = {**MINE, "new": (np.empty((0, 3)), np.empty(0))}
    with pytest.raises(ValueError, match=r"clients\['new'\] has 0 examples; .* min_size, .* 1"):
        data.from_clients(mine)
    clients = data.from_clients(mine, min_size=0)
    np.testing.assert_array_equal(clients.nonempty, range(4))
    drawn = data.sample_clients(jax.random.key(0), clients, 4)
    assert 4 not in drawn.tolist()


x, y = np.ones((2, 3)), np.ones(2)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ((x, y.astype(int)), r"clients\['b'\]\.y has examples of shape \(\) and dtype int64"),
        ((x[:, :2], y), r"clients\['b'\]\.x has examples of shape \(2,\)"),
        ({"x": x, "y": y}, r"clients\['b'\] is PyTreeDef"),
        ((x, y[:1]), r"leading axes \[\(1,\), \(2,\)\]; .* of examples\.$"),
        ((x.tolist(), y), r"clients\['b'\] has leaves with leading axes .* not a list"),
        ((x[:0], y[:0]), r"clients\['b'\] has 0 examples"),
    ],
)
def test_the_client_that_differs_is_named(changed, message):
    with pytest.raises(ValueError, match=message):
        data.from_clients({"a": (x, y), "b": changed, "c": (x, y)})


def test_what_a_device_cannot_hold():
    with pytest.raises(ValueError, match=r"an array of dtype <U1.* number, the same in all arrays"):
        data.from_clients({"a": (x, np.array(["p", "q"]))})
    with pytest.raises(ValueError, match=r"an array of dtype object.* array\.astype"):
        data.from_clients({"a": (x.astype(object), y)})
    with pytest.raises(ValueError, match=r"integers from 0 to 1099511627776; .* int32"):
        data.from_clients({"a": (x, np.array([0, 2**40]))})


def test_bad_arguments():
    with pytest.raises(TypeError, match="clients is a list"):
        data.from_clients([(x, y)])
    with pytest.raises(ValueError, match="clients is empty"):
        data.from_clients({})
    with pytest.raises(ValueError, match="two ids with the text '1'"):
        data.from_clients({1: (x, y), "1": (x, y)})
    with pytest.raises(ValueError, match="number of examples is 0"):
        data.from_clients({1: (x[:0], y[:0])}, min_size=0)


def numbered(num_clients):
    """Client i has i + 1 examples; x tells all of them apart."""
    counter = iter(range(10**6))
    return data.from_clients(
        {
            f"user{i}": (np.array([[next(counter)] for _ in range(i + 1)]), np.zeros(i + 1))
            for i in range(num_clients)
        }
    )


@pytest.mark.parametrize(("held_out", "count"), [(0.25, 5), (0.01, 1), (7, 7), (19, 19)])
def test_clients_are_split(held_out, count):
    clients = numbered(20)
    seen, unseen = data.split_clients(clients, held_out, seed=3)
    assert unseen.num_clients == count
    assert seen.num_clients == 20 - count
    everything = rows_of(clients)
    assert {**rows_of(seen), **rows_of(unseen)} == everything
    for part in (seen, unseen):
        assert list(part.names) == [name for name in clients.names if name in part.names]
        assert part.examples is clients.examples
        assert part.max_size == max(len(everything[name]) for name in part.names)
    again = data.split_clients(clients, held_out, seed=3)
    assert again[1].names == unseen.names
    assert len({data.split_clients(clients, held_out, seed=s)[1].names for s in range(9)}) > 1


def test_clients_without_names_are_split():
    train = data.Examples(np.arange(60)[:, None], np.arange(60) % 3)
    clients = data.partition(train, "iid", 10)
    seen, unseen = data.split_clients(clients, 4)
    assert seen.names is unseen.names is None
    held = [np.asarray(part.indices) for part in (seen, unseen)]
    assert sorted(np.concatenate(held)) == list(range(60))
    assert seen.partition.hash != unseen.partition.hash
    again = data.split_clients(unseen, 1)  # of a part, which holds not all of the examples
    assert sorted(np.concatenate([part.indices for part in again])) == sorted(held[1])


@pytest.mark.parametrize("fraction", [0.01, 0.2, 0.5, 0.99])
def test_examples_are_split(fraction):
    clients = numbered(30)
    train, test = data.split_examples(clients, fraction, seed=1)
    assert train.names == test.names == clients.names
    everything, kept, tested = map(rows_of, (clients, train, test))
    for i, name in enumerate(clients.names):
        assert kept[name] | tested[name] == everything[name]
        assert not kept[name] & tested[name]
        n = i + 1
        wanted = 0 if n == 1 else min(max(round(fraction * n), 1), n - 1)
        assert len(tested[name]) == wanted
        start, size = int(test.starts[i]), int(test.sizes[i])
        assert (np.diff(np.asarray(test.indices)[start : start + size]) > 0).all()
    assert train.examples is test.examples is clients.examples
    assert train.nonempty is None
    np.testing.assert_array_equal(test.nonempty, range(1, 30))
    again = data.split_examples(clients, fraction, seed=1)[1]
    np.testing.assert_array_equal(again.indices, test.indices)
    other = data.split_examples(clients, fraction, seed=2)[1]
    assert not np.array_equal(other.indices, test.indices)


def test_every_example_is_as_likely_for_testing():
    clients = data.from_clients({"a": (np.arange(5), np.zeros(5)), "b": (np.arange(3), np.ones(3))})
    tested = np.concatenate(
        [data.split_examples(clients, 0.4, seed=s)[1].indices for s in range(600)]
    )
    share = np.bincount(tested, minlength=8) / 600
    np.testing.assert_allclose(share, [2 / 5] * 5 + [1 / 3] * 3, atol=0.08)


def test_bad_splits():
    clients = numbered(3)
    for held_out in (0, 3, -1, 0.0, 1.0, np.nan):
        with pytest.raises(ValueError, match="held_out is"):
            data.split_clients(clients, held_out)
    with pytest.raises(ValueError, match=r"held_out is 0\.9, all 2 clients when rounded"):
        data.split_clients(numbered(2), 0.9)
    for held_out in (1, 0.5):
        with pytest.raises(ValueError, match="clients has one client; there must be two"):
            data.split_clients(numbered(1), held_out)
    for wrong in ("0.2", True, None):
        with pytest.raises(TypeError, match="held_out is"):
            data.split_clients(clients, wrong)
    for fraction in (0, 1, 1.5, np.nan):
        with pytest.raises(ValueError, match="fraction is"):
            data.split_examples(clients, fraction)
    with pytest.raises(ValueError, match="seed is -1"):
        data.split_examples(clients, 0.5, seed=-1)
    with pytest.raises(ValueError, match="one example each"):
        data.split_examples(numbered(1), 0.5)


def test_what_is_no_federation_is_not_split():
    test = data.Examples(x, y)
    for use in (
        lambda clients: data.split_clients(clients, 0.5),
        lambda clients: data.split_examples(clients, 0.5),
        lambda clients: data.divide_like(clients, test),
    ):
        with pytest.raises(TypeError, match=r"clients is tuple, not FederatedArrays; see fedjax"):
            use((x, y))


def test_test_data_follow_the_labels_of_training():
    draw = np.random.default_rng(1)
    train = data.Examples(np.zeros((3000, 1)), draw.integers(0, 7, 3000))
    test = data.Examples(np.arange(1100)[:, None], draw.integers(0, 7, 1100))
    clients = data.partition(train, "dirichlet:0.3", 25)
    mine = data.divide_like(clients, test, seed=5)
    np.testing.assert_array_equal(np.sort(mine.indices), np.arange(1100))
    held = np.array([np.bincount(held_by(clients, i).y, minlength=7) for i in range(25)])
    dealt = np.array([np.bincount(held_by(mine, i).y, minlength=7) for i in range(25)])
    exact = held / held.sum(0) * np.bincount(test.y, minlength=7)
    assert np.abs(dealt - exact).max() < 1
    # The largest remainders get what is left of a class.
    up, down = dealt > exact, dealt < exact
    for k in range(7):
        remainder = exact[:, k] % 1
        if up[:, k].any():
            assert remainder[up[:, k]].min() >= remainder[down[:, k]].max() - 1e-9
    again = data.divide_like(clients, test, seed=5)
    np.testing.assert_array_equal(again.indices, mine.indices)
    assert not np.array_equal(data.divide_like(clients, test, seed=6).indices, mine.indices)


def test_test_data_in_exact_proportion():
    # Twice the training set as a test set: everybody gets twice what it holds.
    train = data.Examples(np.zeros((90, 1)), np.arange(90) % 3)
    owners = np.array(["x", "y", "z"])[np.random.default_rng(2).integers(0, 3, 90)]
    clients = data.partition(train, owners)
    mine = data.divide_like(clients, tuple(np.concatenate([leaf, leaf]) for leaf in train))
    np.testing.assert_array_equal(mine.label_histogram(), 2 * clients.label_histogram())
    assert mine.names == ("x", "y", "z")
    assert mine.partition.spec == "like natural"


def test_test_data_that_cannot_follow():
    train = data.Examples(np.zeros((9, 1)), np.arange(9) % 3)
    clients = data.partition(train, "iid", 3)
    with pytest.raises(ValueError, match="label 5, which no client has"):
        data.divide_like(clients, (np.zeros((2, 1)), np.array([0, 5])))
    with pytest.raises(ValueError, match="test has no class labels"):
        data.divide_like(clients, (np.zeros((2, 1)), np.array([0.0, 1.0])))
    with pytest.raises(ValueError, match="examples have no class labels"):
        data.divide_like(data.from_clients(MINE), (np.zeros((2, 1)), np.array([0, 1])))


def test_ids_of_bytes_are_text():
    examples = (np.ones((1, 1)), np.zeros(1))
    ids = ["é".encode(), b"\xff", "c", 7]
    clients = data.from_clients(dict.fromkeys(ids, examples))
    assert clients.names == ("é", "\\xff", "c", "7")
    with pytest.raises(ValueError, match="two ids with the text 'a'"):
        data.from_clients(dict.fromkeys(["a", b"a"], examples))


def test_values_that_are_not_finite_are_reported_by_name():
    broken = {**MINE, "bob": (np.full((1, 3), np.nan), np.zeros(1))}
    found = nonfinite_data(data.from_clients(broken))
    assert found == "1 examples of the clients bob have values that are not finite"
    assert nonfinite_data(data.from_clients(MINE)) == ""
