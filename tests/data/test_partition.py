"""Partitions: invariants for all schemes, and each scheme against its definition."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedjax_lab import data
from fedjax_lab.data.heterogeneity import describe, heterogeneity
from fedjax_lab.data.partition import PARTITIONS, number_owners, split_indices

SPECS = [
    "iid",
    "contiguous",
    "dirichlet:0.001",
    "dirichlet:0.5",
    "dirichlet:1e300",
    "dirichlet_equal:1e-300",
    "dirichlet_equal:0.3",
    "classes_per_client:1",
    "classes_per_client:3",
    "similarity:0",
    "similarity:33.3",
    "similarity:100",
    "quantity:0.01",
    "quantity:5",
]
balanced = np.arange(6000) % 10


def counts_of(labels, part):
    """[N, C] by a loop."""
    classes = labels.max() + 1
    rows = [np.bincount(labels[part.client(i)], minlength=classes) for i in range(len(part.sizes))]
    return np.stack(rows)


@given(
    spec=st.sampled_from(SPECS),
    num_clients=st.integers(1, 40),
    num_classes=st.integers(1, 12),
    n=st.integers(1, 400),
    min_size=st.integers(0, 3),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=300, deadline=None)
def test_disjoint_complete_and_stable(spec, num_clients, num_classes, n, min_size, seed):
    labels = np.random.default_rng(seed).integers(0, num_classes, n)
    if n < num_clients * min_size:
        with pytest.raises(ValueError, match="which requires"):
            split_indices(labels, spec, num_clients, seed, min_size)
        return
    try:
        part = split_indices(labels, spec, num_clients, seed, min_size)
    except ValueError as error:
        # With few examples, some demands on classes and sizes have no solution.
        assert spec.startswith("classes_per_client")
        assert "class" in str(error)  # noqa: PT017
        return
    assert part.indices.dtype == part.sizes.dtype == part.starts.dtype == np.int32
    assert part.sizes.shape == part.starts.shape == (num_clients,)
    assert part.sizes.min() >= min_size
    np.testing.assert_array_equal(np.sort(part.indices), np.arange(n))
    assert part.sizes.sum() == n
    np.testing.assert_array_equal(part.starts, np.concatenate([[0], np.cumsum(part.sizes)[:-1]]))
    again = split_indices(labels, spec, num_clients, seed, min_size)
    np.testing.assert_array_equal(again.indices, part.indices)
    assert again.hash == part.hash
    if spec.partition(":")[0] in ("iid", "dirichlet_equal", "similarity"):
        assert np.ptp(part.sizes) <= 1


def test_hash_and_seed():
    part = split_indices(balanced, "dirichlet:0.1", 20, 3)
    content = part.indices.astype("<i4").tobytes() + part.sizes.astype("<i4").tobytes()
    assert part.hash == hashlib.sha256(content).hexdigest()[:16]
    assert split_indices(balanced, "dirichlet:0.1", 20, 4).hash != part.hash
    assert (part.spec, part.seed) == ("dirichlet:0.1", 3)


@pytest.mark.parametrize("alpha", [0.1, 1.0, 10.0])
def test_dirichlet_marginals(alpha):
    # The share of a class that one client gets is Beta(A, A (N - 1)); it is cut at whole
    # examples, so compare moments: mean 1/N and variance (N - 1) / (N^2 (N A + 1)).
    n, num_clients, seeds = 20000, 8, 40
    labels = np.arange(n) % 10
    shares = np.concatenate(
        [
            counts_of(labels, split_indices(labels, f"dirichlet:{alpha}", num_clients, seed, 0))
            / (n / 10)
            for seed in range(seeds)
        ]
    ).ravel()
    variance = (num_clients - 1) / (num_clients**2 * (num_clients * alpha + 1))
    assert shares.mean() == pytest.approx(1 / num_clients, rel=1e-6)
    assert shares.var() == pytest.approx(variance, rel=0.12)
    # One client per draw, since those of a class are dependent.
    one = shares.reshape(seeds, num_clients, 10)[:, 0].ravel()
    jitter = np.random.default_rng(0).uniform(-0.5, 0.5, one.shape) / (n / 10)
    law = stats.beta(alpha, alpha * (num_clients - 1))
    inner = one > 0.01  # below, whole examples differ from the continuous law
    conditional = (law.cdf(one[inner] + jitter[inner]) - law.cdf(0.01)) / law.sf(0.01)
    assert stats.kstest(conditional.clip(0, 1), "uniform").pvalue > 1e-3


@pytest.mark.parametrize("alpha", [0.1, 1.0])
def test_dirichlet_equal_marginals(alpha):
    # With few clients of a large pool no class runs out early: the first class's share in a
    # client is Beta(A, 9 A). Pool exhaustion bends the last draws, hence the loose variance.
    shares = np.concatenate(
        [
            counts_of(balanced, split_indices(balanced, f"dirichlet_equal:{alpha}", 60, seed)) / 100
            for seed in range(20)
        ]
    )
    np.testing.assert_allclose(shares.mean(0), 0.1, rtol=1e-9)
    assert shares.var() == pytest.approx(0.09 / (10 * alpha + 1), rel=0.2)


def test_tiny_alpha_concentrates():
    counts = counts_of(balanced, split_indices(balanced, "dirichlet:1e-6", 30, 0, min_size=0))
    assert ((counts > 0).sum(0) == 1).all()  # each class has one holder
    counts = counts_of(balanced, split_indices(balanced, "dirichlet_equal:1e-6", 30, 0))
    assert np.median((counts > 0).sum(1)) <= 2  # one, until its class is used up
    sizes = split_indices(balanced, "quantity:1e-6", 30, 0, min_size=2).sizes
    assert sorted(sizes)[-2:] == [2, 6000 - 29 * 2]


def test_dirichlet_reserves_random_classes():
    counts = counts_of(balanced, split_indices(balanced, "dirichlet:1e-6", 1000, 0, min_size=2))
    small = counts[counts.sum(1) == 2]
    assert len(small) >= 990
    assert stats.chisquare(small.sum(0)).pvalue > 1e-3
    # Two draws with replacement from ten classes agree in a tenth of the cases.
    assert (small.max(1) == 2).mean() == pytest.approx(0.1, abs=0.03)


def test_reserve_with_exhausted_classes():
    labels = np.array([0] * 3 + [1] * 95 + [2] * 2)
    part = split_indices(labels, "dirichlet:0.01", 50, 0, min_size=2)
    np.testing.assert_array_equal(part.sizes, np.full(50, 2))


@pytest.mark.parametrize(
    ("num_clients", "per_client"), [(10, 1), (10, 2), (25, 3), (7, 10), (3, 4)]
)
def test_classes_per_client(num_clients, per_client):
    for seed in range(5):
        part = split_indices(balanced, f"classes_per_client:{per_client}", num_clients, seed)
        counts = counts_of(balanced, part)
        assert ((counts > 0).sum(1) == per_client).all()
        holders = (counts > 0).sum(0)
        assert np.ptp(holders) <= 1
        for k in range(10):  # shared evenly
            assert np.ptp(counts[counts[:, k] > 0, k]) <= 1
        if num_clients * per_client % 10 == 0:
            assert np.ptp(part.sizes) <= 2


def test_classes_per_client_pairs_vary():
    # Every pair of classes should meet in some client: the hands are no fixed blocks.
    part = split_indices(balanced, "classes_per_client:2", 500, 0)
    pairs = {tuple(np.flatnonzero(row)) for row in counts_of(balanced, part) > 0}
    assert len(pairs) == 45


def test_classes_per_client_repairs_small_clients():
    labels = np.repeat(np.arange(10), [150, 138, 140, 141, 146, 147, 139, 150, 143, 148])
    part = split_indices(labels, "classes_per_client:2", 700, 0, min_size=2)
    assert part.sizes.min() == 2
    assert ((counts_of(labels, part) > 0).sum(1) <= 2).all()
    with pytest.raises(ValueError, match="Lower min_size"):
        split_indices(np.array([0] * 99 + [1]), "classes_per_client:1", 10, 0, min_size=2)


def test_contiguous_keeps_the_order():
    part = split_indices(balanced[:103], "contiguous", 5, seed=7)
    np.testing.assert_array_equal(part.indices, np.arange(103))
    np.testing.assert_array_equal(part.sizes, [21, 21, 21, 20, 20])


def test_sequences_have_no_label_to_divide_by():
    targets = np.random.default_rng(0).integers(0, 6, (50, 4))
    for spec in SPECS:
        if spec.startswith(("iid", "contiguous", "quantity")):
            part = split_indices(targets, spec, 7, 0)
            assert sorted(part.indices) == list(range(50))
            # The schemes do not look: any labels give the same partition.
            assert part.hash == split_indices(balanced[:50], spec, 7, 0).hash
        else:
            with pytest.raises(ValueError, match=r"shape \(50, 4\).* Give iid, contiguous, q"):
                split_indices(targets, spec, 7, 0)
    natural = split_indices(targets, np.arange(50) % 7, 7, 0)
    np.testing.assert_array_equal(natural.client(3), np.arange(3, 50, 7))
    with pytest.raises(ValueError, match=r"shape \(0, 2\)"):
        split_indices(np.zeros((0, 2), int), "iid", 2, 0)


@pytest.mark.parametrize("spec", ["iid", "contiguous", "quantity:2"])
@pytest.mark.parametrize("targets", [balanced / 7, -balanced, np.zeros((6000, 2, 3))])
def test_targets_of_any_kind_are_not_looked_at(spec, targets):
    expected = split_indices(balanced, spec, 9, seed=4)
    np.testing.assert_array_equal(split_indices(targets, spec, 9, seed=4).indices, expected.indices)
    with pytest.raises(ValueError, match="divides examples by their label"):
        split_indices(targets, "dirichlet:1", 9, seed=4)


@pytest.mark.parametrize(
    ("owners", "names", "numbers"),
    [
        (["b", "a", "b"], ("a", "b"), [1, 0, 1]),
        (np.array(["b", "a"], object), ("a", "b"), [1, 0]),
        (np.array([b"\xc3\xa9", b"z"]), ("z", "é"), [1, 0]),
        (np.array([b"y", b"z"], object), ("y", "z"), [0, 1]),
        ([10, 9, -1, 9], ("-1", "9", "10"), [2, 1, 0, 1]),
    ],
)
def test_owners_are_numbered_in_their_order(owners, names, numbers):
    found = number_owners(owners, 1)
    assert found[0] == names
    np.testing.assert_array_equal(found[1], numbers)


@pytest.mark.parametrize("owners", [[], [[1, 2]], [1.0, 2.0], ["a", None], [True, False]])
def test_owners_that_are_none(owners):
    with pytest.raises(ValueError, match="user_id has client ids of shape"):
        number_owners(owners, 1, "user_id")


def test_owners_that_are_no_text():
    with pytest.raises(ValueError, match="spec has client ids that are bytes and no UTF-8 text"):
        data.partition(np.arange(2), np.array([b"a", b"\xff"]), min_size=1)


def test_owners_of_too_few():
    with pytest.raises(ValueError, match=r"spec gives client 'b' 1 examples; .* min_size, .* 2"):
        number_owners(["a", "b", "a"], 2)


def test_heterogeneity_of_sequences_counts_their_words():
    targets = np.random.default_rng(0).integers(0, 6, (50, 4))
    part = split_indices(targets, "contiguous", 3, 0)
    found = heterogeneity(targets, part)
    parts = [targets[:17], targets[17:34], targets[34:]]
    for i, held in enumerate(parts):
        for word in range(6):
            assert found.label_histogram[i, word] == (held == word).sum()
        shares = [(held == word).mean() - (targets == word).mean() for word in range(6)]
        assert found.tv_distance[i] == pytest.approx(np.abs(shares).sum() / 2)
    np.testing.assert_array_equal(found.sizes, [17, 17, 16])
    assert "words per client: min" in describe(targets, part)


def test_similarity():
    part = split_indices(balanced, "similarity:0", 20, 0)
    assert ((counts_of(balanced, part) > 0).sum(1) == 1).all()  # 300 each of 600 per class
    part = split_indices(balanced, "similarity:50", 20, 0)
    top = counts_of(balanced, part).max(1) / 300
    np.testing.assert_allclose(top, 0.5 + 0.05, atol=0.09)
    part = split_indices(balanced, "similarity:100", 20, 0)
    assert stats.chi2_contingency(counts_of(balanced, part)).pvalue > 1e-3


def test_iid_and_quantity_have_iid_labels():
    for spec in ("iid", "quantity:2"):
        counts = counts_of(balanced, split_indices(balanced, spec, 20, 0))
        assert stats.chi2_contingency(counts).pvalue > 1e-3
    sizes = np.array([split_indices(balanced, "quantity:2", 10, s, 0).sizes for s in range(100)])
    assert (sizes[:, 0] / 6000).var() == pytest.approx(0.09 / 21, rel=0.5)


def test_natural():
    owners = np.random.default_rng(0).integers(0, 5, 100)
    part = split_indices(np.zeros(100, int), owners, 5, 0)
    for i in range(5):
        np.testing.assert_array_equal(part.client(i), np.flatnonzero(owners == i))
    assert part.spec == "natural"
    with pytest.raises(ValueError, match=r"lie in \[0, 4\)"):
        split_indices(np.zeros(100, int), owners, 4, 0)
    with pytest.raises(ValueError, match="gives client 5 0 examples"):
        split_indices(np.zeros(100, int), owners, 6, 0)
    assert split_indices(np.zeros(100, int), owners, 6, 0, min_size=0).sizes[5] == 0
    with pytest.raises(ValueError, match="integer client id for each"):
        split_indices(np.zeros(100, int), owners[:50], 5, 0)


@pytest.mark.parametrize(
    ("spec", "num_clients", "message"),
    [
        ("dirichlet:0", 10, "greater than 0"),
        ("dirichlet:-1", 10, "greater than 0"),
        ("dirichlet:nan", 10, "finite"),
        ("dirichlet_equal:inf", 10, "finite"),
        ("quantity:nan", 10, "finite"),
        ("dirichlet", 10, "'dirichlet:A' with a number"),
        ("dirichlet:x", 10, "'dirichlet:A' with a number"),
        ("dirichlet:0.1:3", 10, "'dirichlet:A' with a number"),
        ("iid:3", 10, "takes no number"),
        ("dirichelt:1", 10, "Did you mean 'dirichlet'"),
        ("", 10, "must be one of"),
        ("natural", 10, "array of client ids"),
        ("similarity:101", 10, "at most 100"),
        ("similarity:-1", 10, "at least 0"),
        ("classes_per_client:2.5", 10, "integer"),
        ("classes_per_client:nan", 10, "integer"),
        ("classes_per_client:0", 10, "at least 1"),
        ("classes_per_client:11", 10, "10 classes"),
        ("classes_per_client:2", 4, "would have no client"),
        ("iid", 3001, "which requires"),
        ("iid", 0, "num_clients is 0"),
    ],
)
def test_errors(spec, num_clients, message):
    with pytest.raises(ValueError, match=message):
        split_indices(balanced, spec, num_clients, 0)


def test_type_errors():
    with pytest.raises(TypeError, match="num_clients"):
        split_indices(balanced, "iid", 2.0, 0)
    with pytest.raises(TypeError, match="seed"):
        split_indices(balanced, "iid", 2, None)
    with pytest.raises(ValueError, match="dtype float64"):
        split_indices(balanced * 1.0, "similarity:50", 2, 0)


def test_heterogeneity_against_a_loop():
    labels = np.random.default_rng(1).integers(0, 4, 200)
    part = split_indices(labels, "dirichlet:0.2", 15, 0, min_size=0)
    found = heterogeneity(labels, part)
    counts = counts_of(labels, part)
    np.testing.assert_array_equal(found.label_histogram, counts)
    overall = np.bincount(labels) / 200
    distances = [np.abs(row / row.sum() - overall).sum() / 2 for row in counts if row.sum()]
    assert found.mean_tv_distance == pytest.approx(np.mean(distances))
    assert found.size_range == (part.sizes.min(), np.median(part.sizes), part.sizes.max())
    np.testing.assert_array_equal(
        found.classes_per_client, [len(np.flatnonzero(r)) for r in counts]
    )
    text = describe(labels, part)
    assert part.hash in text
    assert "200 examples, 15 clients" in text


def test_every_scheme_is_listed():
    assert {spec.partition(":")[0] for spec in SPECS} == {p.partition(":")[0] for p in PARTITIONS}
