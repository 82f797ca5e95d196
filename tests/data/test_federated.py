"""The resident federation: what is on the device, and what is said and drawn about it."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_lab import data
from fedjax_lab.data.partition import split_indices

rng = np.random.default_rng(0)
train = data.Examples(rng.integers(0, 256, (300, 4, 4, 1), dtype=np.uint8), np.arange(300) % 10)


def test_arrays_are_those_of_the_partition():
    clients = data.partition(train, "dirichlet:0.3", 12, seed=5)
    host = split_indices(train.y, "dirichlet:0.3", 12, 5)
    for name in ("indices", "starts", "sizes"):
        found = getattr(clients, name)
        assert found.dtype == jnp.int32
        np.testing.assert_array_equal(found, getattr(host, name))
    assert clients.examples.x.dtype == jnp.uint8
    np.testing.assert_array_equal(clients.examples.x, train.x)
    assert clients.nonempty is None
    assert (clients.min_size, clients.max_size) == (host.sizes.min(), host.sizes.max())
    assert clients.partition == (type(clients.partition))("dirichlet:0.3", 5, host.hash)
    assert all(not leaf.committed for leaf in jax.tree.leaves(clients))


def test_a_later_write_to_the_host_does_not_show():
    mine = data.Examples(np.zeros((512, 512), np.float32), np.zeros(512, np.int32))
    clients = data.partition(mine, "iid", 4)
    mine.x[:] = 1
    assert clients.examples.x.max() == 0


def test_empty_clients():
    clients = data.partition(train, "dirichlet:0.001", 40, min_size=0)
    sizes = np.asarray(clients.sizes)
    assert (sizes == 0).any()
    np.testing.assert_array_equal(clients.nonempty, np.flatnonzero(sizes))
    assert clients.num_available == len(clients.nonempty)
    assert clients.min_size == sizes[sizes > 0].min()
    assert f"{(sizes == 0).sum()} of them empty" in clients.summary()


def test_is_a_pytree_with_static_sizes():
    clients = data.partition(train, "iid", 7)
    traces = []

    @jax.jit
    def total(clients):
        traces.append(clients.max_size)
        return clients.sizes.sum() + clients.max_size * 0

    assert total(clients) == 300
    other = data.partition(train, "iid", 7)
    assert total(other) == 300
    assert len(traces) == 1
    back = jax.tree.unflatten(jax.tree.structure(clients), jax.tree.leaves(clients))
    assert back.partition == clients.partition
    hash(jax.tree.structure(clients))


def test_histogram_and_summary():
    clients = data.partition(train, "classes_per_client:2", 10)
    expected = [
        np.bincount(
            np.asarray(clients.examples.y)[np.asarray(clients.indices)[start : start + size]],
            minlength=10,
        )
        for start, size in zip(clients.starts.tolist(), clients.sizes.tolist(), strict=True)
    ]
    np.testing.assert_array_equal(clients.label_histogram(), expected)
    text = clients.summary()
    assert "300 examples, 10 clients" in text
    assert "max 2 of 10" in text
    assert clients.partition.hash in text


@pytest.mark.parametrize(("num_clients", "spec"), [(1, "iid"), (100, "dirichlet:0.1")])
def test_plot(tmp_path, num_clients, spec):
    pytest.importorskip("matplotlib")
    clients = data.partition(train, spec, num_clients)
    figure = clients.plot(tmp_path / "partition.png")
    assert (tmp_path / "partition.png").read_bytes().startswith(b"\x89PNG")
    image = figure.axes[1].images[0].get_array()
    histogram = clients.label_histogram()
    np.testing.assert_allclose(image.T, histogram / histogram.sum(1, keepdims=True))


def test_plot_shows_names_as_they_are(tmp_path):
    pytest.importorskip("matplotlib")
    names = ("a$b$c", r"$\frac$")  # the second is no formula
    clients = data.from_clients({name: (train.x[:3], train.y[:3]) for name in names})
    figure = clients.plot(tmp_path / "partition.svg")
    ticks = figure.axes[1].get_xticklabels()
    assert [(tick.get_text(), tick.get_parse_math()) for tick in ticks] == [
        (name, False) for name in names
    ]


def test_plot_of_many_clients_shows_some(tmp_path):
    pytest.importorskip("matplotlib")
    many = data.synthetic.noise_images(20000, (1,), 10)
    figure = data.partition(many, "dirichlet:0.1", 10000).plot(tmp_path / "many.svg")
    assert figure.axes[1].images[0].get_array().shape == (10, 100)
    assert "100 of 10,000" in figure.axes[1].get_xlabel()


def test_natural():
    owners = np.arange(300) % 3
    clients = data.partition(train, owners, 3)
    assert clients.partition.spec == "natural"
    np.testing.assert_array_equal(clients.indices[100:200], np.arange(1, 300, 3))


def test_owners_by_name():
    owners = np.array(["bob", "al", "cy"])[np.arange(300) % 3]
    owners[0] = "zoe"  # with one example
    clients = data.partition(train, owners)
    assert clients.names == ("al", "bob", "cy", "zoe")
    for i, name in enumerate(clients.names):
        start, size = int(clients.starts[i]), int(clients.sizes[i])
        held = clients.indices[start : start + size]
        np.testing.assert_array_equal(held, np.flatnonzero(owners == name))
    assert "names: al, bob, cy, zoe" in clients.summary()
    back = jax.tree.unflatten(jax.tree.structure(clients), jax.tree.leaves(clients))
    assert back.names == clients.names
    assert data.partition(train, np.arange(300) * 7 % 21).names == ("0", "7", "14")
    assert data.partition(train, owners, 4).names == clients.names
    with pytest.raises(ValueError, match="num_clients is 5; spec has 4 different text ids"):
        data.partition(train, owners, 5)


def test_owners_in_numpys_own_text():
    owners = np.array(["bob", "al", "cy"])[np.arange(300) % 3]
    expected = data.partition(train, owners)
    for num_clients in (None, 3):
        clients = data.partition(train, owners.astype(np.dtypes.StringDType()), num_clients)
        assert clients.names == expected.names
        np.testing.assert_array_equal(clients.indices, expected.indices)
    lacking = owners.astype(np.dtypes.StringDType(na_object=np.nan))
    lacking[7] = np.nan
    with pytest.raises(ValueError, match="all of them integers or all of them text"):
        data.partition(train, lacking)


@pytest.mark.parametrize("other", [1, math.nan, None, True, b"al"])
def test_owners_in_a_list_are_of_one_kind(other):
    """NumPy made text of what stood beside text: an owner called nan, and "1" of 1."""
    owners = ["al", "1"] * 150
    assert data.partition(train, owners).names == ("1", "al")
    with pytest.raises(ValueError, match="all of them integers or all of them text"):
        data.partition(train, [*owners[1:], other])


@pytest.mark.parametrize(
    "y",
    [np.linspace(-1, 1, 300), -np.arange(300), np.zeros((300, 2, 2)), np.arange(300) * 10**6],
    ids=["float", "negative", "matrices", "large"],
)
def test_targets_that_are_no_classes(tmp_path, y):
    clients = data.partition((train.x, y), "iid", 7, seed=3)
    expected = data.partition(train, "iid", 7, seed=3)
    np.testing.assert_array_equal(clients.indices, expected.indices)
    np.testing.assert_array_equal(clients.examples.y, y.astype(clients.examples.y.dtype))
    assert "classes" not in clients.summary()
    assert "300 examples, 7 clients" in clients.summary()
    with pytest.raises(ValueError, match="no class labels"):
        clients.label_histogram()
    pytest.importorskip("matplotlib")
    (axes,) = clients.plot(tmp_path / "sizes.png").axes
    assert [bar.get_height() for bar in axes.patches] == clients.sizes.tolist()


def test_other_pytrees():
    mine = {"image": train.x, "y": train.y}
    clients = data.partition(mine, "classes_per_client:2", 10)
    assert set(clients.examples) == {"image", "y"}
    expected = data.partition(train, "classes_per_client:2", 10).label_histogram()
    np.testing.assert_array_equal(clients.label_histogram(), expected)
    assert data.partition({"image": train.x}, "iid", 10).num_clients == 10
    with pytest.raises(ValueError, match=r"by their label, an integer .* no field y"):
        data.partition({"image": train.x}, "dirichlet:1", 10)


def test_errors():
    with pytest.raises(ValueError, match="leading axes"):
        data.partition({"x": train.x, "n": 3}, "iid", 3)
    with pytest.raises(ValueError, match="leading axes"):
        data.partition(data.Examples(train.x[:5], train.y), "iid", 3)
    with pytest.raises(ValueError, match="counted from 0"):
        data.partition(data.Examples(train.x, train.y - 1), "dirichlet:1", 3)
    with pytest.raises(TypeError, match="num_clients is None"):
        data.partition(train, "iid")
