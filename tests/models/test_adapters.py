"""Adapters in a federation: against NumPy, under several methods, and in the files of peft."""

import functools
import json
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_lab import (
    algorithms,
    build_round,
    data,
    models,
    simulate,
    with_compression,
    with_dp,
    with_frozen,
    with_ranks,
    with_secure_aggregation,
)
from fedjax_lab.simulation.evaluate import build_evaluation
from tests.federations import batch_of
from tests.models.test_decoder import CONFIGS
from tests.tiers import few

safetensors = pytest.importorskip("safetensors.numpy")
S, K, B, M, N, RANK, SCALE, LR = 3, 2, 4, 6, 5, 2, 1.5, 0.05


def normal(shape, seed):
    return np.random.default_rng(seed).normal(size=shape)


class Linear:
    """Squared error of x W: in the library, and its gradients by hand."""

    kernel = normal((M, N), 0)
    down, up = normal((M, RANK), 1), normal((RANK, N), 2)
    x, y = normal((S, K, B, M), 3), normal((S, K, B, N), 4)

    @staticmethod
    def loss(params, examples, key):
        return 0.5 * jnp.square(examples[0] @ params["kernel"] - examples[1]).sum(-1)

    @classmethod
    def adapters(cls):
        return {"kernel": models.lora.Adapter(jnp.asarray(cls.down), jnp.asarray(cls.up))}

    @classmethod
    def loss_of_adapters(cls, adapters, examples, key):
        merged = models.merge_adapters({"kernel": cls.kernel}, adapters)
        return cls.loss(merged, examples, key)

    @classmethod
    def batch(cls):
        return batch_of((jnp.asarray(cls.x), jnp.asarray(cls.y)))

    @classmethod
    def twin(cls, train_down):
        """FedAvg in NumPy: every client's two matrices after K steps, averaged."""
        ends = []
        for client in range(S):
            down, up = cls.down.copy(), cls.up.copy()
            for x, y in zip(cls.x[client], cls.y[client], strict=True):
                error = x @ (cls.kernel + SCALE * down @ up) - y
                to_kernel = x.T @ error / B
                to_down, to_up = SCALE * to_kernel @ up.T, SCALE * down.T @ to_kernel
                down = down - LR * to_down if train_down else down
                up = up - LR * to_up
            ends.append((down, up))
        return tuple(np.mean(sides, axis=0) for sides in zip(*ends, strict=True)), ends


def run_round(loss, trained, frozen, wrap=lambda a: a, client_map="vmap"):
    algorithm = wrap(with_frozen(functools.partial(algorithms.fedavg, client_lr=LR), loss, frozen))
    state = algorithm.init(trained, S)
    state, metrics = jax.jit(build_round(algorithm, client_map))(state, Linear.batch())
    return algorithm.params(state), metrics


def test_fedavg_of_adapters_is_the_twins(x64):
    def loss(adapters, examples, key, frozen):
        return Linear.loss(models.merge_adapters(frozen, adapters, SCALE), examples, key)

    adapters = Linear.adapters()
    found, metrics = run_round(loss, adapters, {"kernel": Linear.kernel})
    (down, up), _ = Linear.twin(train_down=True)
    np.testing.assert_allclose(found["kernel"].down, down, rtol=0, atol=1e-9)
    np.testing.assert_allclose(found["kernel"].up, up, rtol=0, atol=1e-9)
    assert float(metrics["bytes_up"]) == S * 8 * (M * RANK + RANK * N)


def test_ffa_lora_is_the_twins_and_averages_products(x64):
    adapters = Linear.adapters()
    downs, ups = models.split_adapters(adapters)

    def loss(ups, examples, key, frozen):
        joined = models.join_adapters(frozen["down"], ups)
        return Linear.loss(models.merge_adapters(frozen["body"], joined, SCALE), examples, key)

    found, metrics = run_round(loss, ups, {"down": downs, "body": {"kernel": Linear.kernel}})
    (_, up), ends = Linear.twin(train_down=False)
    np.testing.assert_allclose(found["kernel"], up, rtol=0, atol=1e-9)
    products = np.mean([down @ up for down, up in ends], axis=0)
    np.testing.assert_allclose(Linear.down @ np.asarray(found["kernel"]), products, atol=1e-9)
    assert float(metrics["bytes_up"]) == S * 8 * RANK * N  # half of what LoRA sends, nearly
    with pytest.raises(ValueError, match="down and up differ: a, kernel is in one"):
        models.join_adapters(downs, {"a": ups["kernel"]})


@pytest.mark.parametrize("padded", few(1, ["adapters", "changes"]))
def test_clients_of_lower_ranks_are_the_twins(padded, x64):
    """Clients of ranks 1, 2, 1 in NumPy on cut matrices; zeros stand for what they do not hold."""
    ranks = np.array([1, 2, 1])
    ends, starts = [], []
    for client, rank in enumerate(ranks):
        cut = type("Cut", (Linear,), {"down": Linear.down[:, :rank], "up": Linear.up[:rank]})
        down, up = cut.twin(train_down=True)[1][client]
        ends.append(
            [np.pad(down, ((0, 0), (0, RANK - rank))), np.pad(up, ((0, RANK - rank), (0, 0)))]
        )
        held = np.arange(RANK) < rank
        starts.append([Linear.down * held, Linear.up * held[:, None]])
    expected = [np.mean(sides, axis=0) for sides in zip(*ends, strict=True)]
    if padded == "changes":
        before = [np.mean(sides, axis=0) for sides in zip(*starts, strict=True)]
        expected = [
            server + end - start
            for server, end, start in zip((Linear.down, Linear.up), expected, before, strict=True)
        ]

    def loss(adapters, examples, key, frozen):
        return Linear.loss(models.merge_adapters(frozen, adapters, SCALE), examples, key)

    adapters = Linear.adapters()

    def wrap(algorithm):
        return with_ranks(algorithm, ranks, padded=padded)

    for client_map in ("vmap", "scan"):
        found, metrics = run_round(loss, adapters, {"kernel": Linear.kernel}, wrap, client_map)
        np.testing.assert_allclose(found["kernel"].down, expected[0], rtol=0, atol=1e-9)
        np.testing.assert_allclose(found["kernel"].up, expected[1], rtol=0, atol=1e-9)
        assert float(metrics["bytes_up"]) == 8 * ranks.sum() * (M + N)
        assert float(metrics["bytes_down"]) == 8 * ranks.sum() * (M + N)


def test_a_number_beside_the_adapters_is_sent_whole(x64):
    """FedNova sends the number of its steps, 4 bytes, in a message of any rank."""
    ranks = np.array([1, 2, 1])
    adapters = Linear.adapters()
    algorithm = with_ranks(algorithms.fednova(Linear.loss_of_adapters, client_lr=LR), ranks)
    state = algorithm.init(adapters, S)
    metrics = build_round(algorithm, "vmap")(state, Linear.batch())[1]
    expected = 8 * ranks * (M + N)
    assert float(metrics["bytes_up"]) == (expected + 4).sum()
    assert float(metrics["bytes_down"]) == expected.sum()
    traffic = algorithm.traffic(adapters)
    np.testing.assert_array_equal(traffic.of_clients(S), [expected + 4, expected])
    rounds = {name: np.repeat(metrics[name], 2) for name in ("participants", "message_parts")}
    assert traffic.of_rounds(rounds) == (2 * (expected + 4).sum(), 2 * expected.sum())


def test_encoded_messages_are_whole_and_others_as_long_as_the_rank(x64):
    """Against the method without ranks in a direction that has an encoding, else without it."""
    ranks = np.array([1, 2, 1])
    adapters, part = Linear.adapters(), 8 * ranks * (M + N)
    plain = algorithms.fedavg(Linear.loss_of_adapters, client_lr=LR)
    up = functools.partial(with_compression, compressor="top_k:0.5")
    both = functools.partial(up, downlink="sign")
    secure = functools.partial(with_secure_aggregation, bits=16, clip=1.0)
    for algorithm, alone, of_down in (
        (with_ranks(up(plain), ranks), up(plain), part),
        (up(with_ranks(plain, ranks)), up(plain), part),
        (with_ranks(both(plain), ranks), both(plain), both(plain).downlink(adapters)),
        (both(with_ranks(plain, ranks)), both(plain), both(plain).downlink(adapters)),
        (secure(with_ranks(plain, ranks)), secure(plain), part),
    ):
        expected = np.broadcast_arrays(alone.uplink(adapters), of_down, ranks)[:2]
        traffic = algorithm.traffic(adapters)
        np.testing.assert_array_equal(traffic.of_clients(S), expected)
        rounds = {"participants": np.array([S, S]), "message_parts": np.full(2, ranks.sum())}
        assert traffic.of_rounds(rounds) == tuple(2 * np.sum(expected, 1))
    algorithm = with_ranks(up(plain), ranks)
    metrics = build_round(algorithm, "vmap")(algorithm.init(adapters, S), Linear.batch())[1]
    assert float(metrics["bytes_up"]) == S * up(plain).uplink(adapters)
    assert float(metrics["bytes_down"]) == part.sum()


def test_ranks_that_do_not_fit():
    def of(ranks, adapters=None, wrap=lambda a: a, method=algorithms.fedavg):
        algorithm = with_ranks(wrap(method(Linear.loss, client_lr=0.1)), ranks)
        algorithm.init(
            adapters or {"kernel": models.lora.Adapter(np.ones((4, 2)), np.ones((2, 3)))}, 3
        )

    of([1, 2, 2])
    for wrong, error, message in (
        (lambda: of([1, 1, 1]), ValueError, r"ranks \[2\]; they must have one, .* 1"),
        (lambda: of([1, 2]), ValueError, "ranks has 2 entries; there are 3 clients"),
        (lambda: of([0, 2, 2]), ValueError, "each must be at least 1"),
        (lambda: of([1.0, 2.0, 2.0]), TypeError, "must be integers, one for each client"),
        (lambda: of([1, 2, 2], {"w": np.ones((2, 2))}), ValueError, "leaves that are no adapters"),
        (lambda: of([1, 2, 2], method=algorithms.mifa), ValueError, "takes methods whose clients"),
        (
            lambda: of([1, 2, 2], wrap=lambda a: with_dp(a, 1.0, 1.0)),
            ValueError,
            r"with_ranks\(..., padded='changes'\)",
        ),
    ):
        with pytest.raises(error, match=message):
            wrong()


# --- a decoder that a federation fine-tunes

CONFIG = models.DecoderConfig(
    vocab_size=16, width=64, num_layers=2, num_heads=2, num_kv_heads=1, mlp_width=256, init_std=0.3
)
FEDAVG = functools.partial(algorithms.fedavg, client_lr=0.3)
SCAFFOLD = functools.partial(algorithms.scaffold, client_lr=0.3)
FEDADAM = functools.partial(algorithms.fedadam, client_lr=0.3, server_lr=0.03)
FEDPROX = functools.partial(algorithms.fedprox, client_lr=0.3, prox_weight=0.1)
RANKS = [1, 2, 4, 4]


def top_k(algorithm):
    return with_compression(algorithm, "top_k:0.75")


def private(algorithm):
    return with_dp(algorithm, clip_norm=1.0, noise_multiplier=0.01)


def ranked(algorithm, padded="changes"):
    return with_ranks(algorithm, RANKS, padded=padded)


class Case(NamedTuple):
    """A method, what is around it, and the vectors of a message (None: a quarter of one)."""

    build: Callable
    wrap: Callable = lambda algorithm: algorithm
    vectors: int | None = 1
    share: float = 1.0  # of a message that clients of lower ranks send on average
    fixed: bool = False  # whether ``down`` is: FFA-LoRA


METHODS = {
    "fedavg": Case(FEDAVG),
    "scaffold": Case(SCAFFOLD, vectors=2),
    "fedadam": Case(FEDADAM),
    "fedprox": Case(FEDPROX),
    "top_k": Case(FEDAVG, top_k, None),
    "dp": Case(FEDAVG, private),
    "ffa, scaffold": Case(SCAFFOLD, vectors=2, fixed=True),
    "ffa, dp": Case(FEDAVG, private, fixed=True),
    "ranks, scaffold": Case(SCAFFOLD, ranked, 2, 11 / 16),
    "ranks, fedadam": Case(FEDADAM, lambda a: ranked(a, "adapters"), 1, 11 / 16),
    "ranks, fedprox": Case(FEDPROX, ranked, 1, 11 / 16),
    "ranks, dp": Case(FEDAVG, lambda a: private(ranked(a)), 1, 11 / 16),
    "top_k in ranks": Case(FEDAVG, lambda a: ranked(top_k(a)), None),
    "ranks in top_k": Case(FEDAVG, lambda a: top_k(ranked(a)), None),
}


@functools.cache
def federation():
    """Four clients that count up or down, in steps of their own; the first params; the adapters."""
    clients = {}
    for client, step in enumerate((1, 2, -1, 3)):
        texts = [(np.arange(start, start + 6 * step, step) % 16) for start in range(16)]
        clients[client] = data.pack([(text, np.arange(6) > 1) for text in texts], 10)
    model = models.decoder(CONFIG, dtype="bfloat16", remat=True, adapter_dropout=0.05)
    params = jax.jit(model.init)(jax.random.key(0), np.zeros((1, 1), np.int32))
    adapters = models.init_adapters(
        jax.random.key(1), params, ("layers/query/kernel", "layers/down/kernel"), 4,
        stacked="layers/*",
    )  # fmt: skip
    return data.from_clients(clients), model, params, adapters


@pytest.mark.methods
@pytest.mark.parametrize("name", METHODS)
def test_a_federation_fine_tunes_a_decoder(name, tmp_path):
    """One copy of bfloat16 weights, in no checkpoint or program; float32 adapters; exact bytes."""
    clients, model, params, adapters = federation()
    case = METHODS[name]
    loss = models.answer_loss
    counts = models.answer_counts
    down, up = models.split_adapters(adapters)
    frozen = {"weights": params, "down": down if case.fixed else {}}
    adapters = up if case.fixed else adapters

    def applied(frozen):
        def apply(adapters, x, key):
            if case.fixed:
                adapters = models.join_adapters(frozen["down"], adapters)
            whole = models.attach_adapters(frozen["weights"], adapters, 2.0)
            return model.apply(whole, x, key)

        return apply

    algorithm = case.wrap(
        with_frozen(
            case.build,
            lambda adapters, examples, key, frozen: loss(applied(frozen))(adapters, examples, key),
            frozen,
        )
    )
    per_row = data.scored_per_row(clients.examples)
    evaluate = build_evaluation(
        lambda adapters, examples, frozen: counts(applied(frozen), per_row)(adapters, examples),
        clients.examples, frozen=frozen,
    )  # fmt: skip
    before = evaluate(adapters)
    result = simulate(
        algorithm, adapters, clients, rounds=6, cohort_size=4, local_steps=3, batch_size=2,
        replace=True, evaluate=evaluate, eval_every=6, client_map="scan", run_dir=tmp_path,
    )  # fmt: skip
    row = result.history[-1]
    assert row["test_loss"] < before["test_loss"] - 0.1
    trained = sum(leaf.size for leaf in jax.tree.leaves(adapters))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(result.params)} == {"float32"}
    if case.vectors is None:  # a quarter of the numbers, each with its place
        kept, bits = trained // 4, int(np.ceil(np.log2(trained)))
        assert row["bytes_up"] == 6 * 4 * (4 * kept + -(-kept * bits // 8))
    else:
        assert row["bytes_up"] == 6 * 4 * case.vectors * 4 * trained * case.share
    assert algorithm.uplink(adapters) * 24 * case.share == row["bytes_up"]
    # One copy, the caller's own, and none on disk.
    body = params["layers"]["gate"]["kernel"]
    assert result.state.frozen["weights"]["layers"]["gate"]["kernel"] is body
    assert not body.is_deleted()
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    on_disk = [file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()]
    sample = np.asarray(body).tobytes()[:64]
    assert not any(sample in content for content in on_disk)
    assert 0 < sum(map(len, on_disk)) < weights  # a checkpoint is compressed
    state = algorithm.init(adapters, 4)
    batch = data.draw_batch(
        clients, jax.random.key(0), 0, cohort_size=4, local_steps=3, batch_size=2, replace=True
    )
    text = jax.jit(build_round(algorithm, "scan")).lower(state, batch).as_text()
    assert len(text) < 2 * weights
    assert 'dense<"0x' not in text


# --- files


@pytest.fixture
def saved(tmp_path):
    config = CONFIGS["llama"]
    model = models.decoder(config)
    params = jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, 1), np.int32))
    adapters = models.init_adapters(
        jax.random.key(1), params, ("layers/query/kernel", "head/kernel"), 3, stacked="layers/*"
    )
    adapters = jax.tree.map(lambda leaf: leaf + 0.5, adapters)
    models.save_adapters(tmp_path / "a", config, adapters, scale=2.0)
    return tmp_path / "a", config, adapters


def test_adapters_are_written_as_peft_names_them(saved):
    folder, config, adapters = saved
    arrays = safetensors.load_file(folder / "adapter_model.safetensors")
    stem = "base_model.model.model.layers.1.self_attn.q_proj.lora_"
    down, up = adapters["layers/query/kernel"]
    np.testing.assert_array_equal(arrays[f"{stem}A.weight"], down[1].T)
    np.testing.assert_array_equal(arrays[f"{stem}B.weight"], up[1].T)
    head = adapters["head/kernel"].down
    np.testing.assert_array_equal(arrays["base_model.model.lm_head.lora_A.weight"], head.T)
    assert len(arrays) == 6
    fields = json.loads((folder / "adapter_config.json").read_text())
    assert (fields["r"], fields["lora_alpha"]) == (3, 6.0)
    assert fields["target_modules"] == ["lm_head", "q_proj"]
    found, scale = models.load_adapters(folder, config)
    assert scale == 2.0
    jax.tree.map(np.testing.assert_array_equal, found, adapters)


@pytest.mark.parametrize(
    ("changes", "message"),
    few(
        8,
        [
            ({"peft_type": "IA3"}, "peft_type is 'IA3'; it must be 'LORA'"),
            ({"use_dora": True}, "use_dora is True; it must be False"),
            ({"rank_pattern": {"q_proj": 8}}, "rank_pattern is"),
            ({"bias": "all"}, "bias is 'all'"),
            ({"new_kind": 3}, r"the field 'new_kind' \(here 3\) is not known"),
            ({"target_modules": "all-linear"}, "target_modules is 'all-linear'"),
            ({"target_modules": ["q_proj", "c_attn"]}, r"target_modules is \['q_proj', 'c_attn'\]"),
            ({"target_modules": ["q_proj"]}, r"the files have 'base_model\.model\.lm_head"),
            ({"target_modules": ["q_proj", "lm_head", "k_proj"]}, "the files lack .*k_proj"),
            ({"r": 4}, r"it must be floats \[4, 24\]|it must be floats \[29, 4\]"),
            ({"r": 0}, "r is 0"),
            ({"lora_alpha": None}, "lora_alpha is None; it must be a number"),
            ({"lora_alpha": np.nan}, "NaN is no number of JSON"),
            ({"use_rslora": "no"}, "use_rslora is 'no'"),
            ({"lora_alpha": True}, "lora_alpha is True; it must be a number"),
            ({"lora_alpha": 10**400}, "the number 10+ is out of range"),
            *(
                (
                    {"init_lora_weights": begin},
                    f"init_lora_weights is '{begin}'; it must be true, .* Save",
                )
                for begin in (
                    "pissa",
                    "pissa_niter_16",
                    "olora",
                    "corda",
                    "loftq",
                    "eva",
                    "lora_ga",
                )
            ),
            ({"layers_to_transform": 0}, "layers_to_transform is 0"),
            ({"modules_to_save": ["lm_head"]}, "modules_to_save is"),
            ({"alpha_pattern": {"q_proj": 8}}, "alpha_pattern is"),
            ({"lora_bias": True}, "lora_bias is True"),
            ({"fan_in_fan_out": True}, "fan_in_fan_out is True"),
            ({"exclude_modules": "lm_head"}, "exclude_modules is 'lm_head'"),
            ({"trainable_token_indices": [3]}, r"trainable_token_indices is \[3\]"),
            ({"velora_config": {"scale": 1}}, "the field 'velora_config'"),
        ],
    ),
)
def test_adapters_of_another_kind_are_refused(changes, message, saved):
    folder, config, _ = saved
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ValueError, match=message):
        models.load_adapters(folder, config)


@pytest.mark.parametrize("begin", few(1, [True, False, None, "gaussian", "orthogonal"]))
def test_beginnings_that_leave_the_kernels_as_they_are(begin, saved):
    folder, config, adapters = saved
    file = folder / "adapter_config.json"
    fields = json.loads(file.read_text()) | {"init_lora_weights": begin, "loftq_config": {}}
    file.write_text(json.dumps(fields | {"eva_config": None, "layers_to_transform": None}))
    found, scale = models.load_adapters(folder, config)
    jax.tree.map(np.testing.assert_array_equal, found, adapters)
    assert scale == 2.0


def test_the_scale_of_rank_stabilised_adapters(saved):
    folder, config, _ = saved
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"use_rslora": True}))
    assert models.load_adapters(folder, config)[1] == pytest.approx(6 / 3**0.5)


@pytest.mark.parametrize("number", [np.float32(0.5), jnp.float32(0.5)])
def test_numbers_of_numpy_and_jax_are_written(number, saved, tmp_path):
    _, config, adapters = saved
    models.save_adapters(tmp_path / "b", config, adapters, number, dropout=number)
    fields = json.loads((tmp_path / "b" / "adapter_config.json").read_text())
    assert (fields["lora_alpha"], fields["lora_dropout"]) == (1.5, 0.5)
    assert models.load_adapters(tmp_path / "b", config)[1] == 0.5


def test_adapters_that_cannot_be_written(saved, tmp_path):
    _, config, adapters = saved
    query = adapters["layers/query/kernel"]
    for wrong, message in (
        ({}, r"the ranks \[\]; they must have one"),
        (adapters | {"head/kernel": query._replace(down=np.ones((24, 4)))}, r"ranks \[3, 4\]"),
        ({"norm/scale": query}, "'norm/scale', which is no kernel of the decoder"),
        ({"head/kernel": query}, r"adapters\['head/kernel'\]\.down has the shape"),
        ({"layers/query/kernel": query._replace(up=query.up + np.nan)}, "of finite numbers"),
    ):
        with pytest.raises(ValueError, match=message):
            models.save_adapters(tmp_path / "b", config, wrong)
    assert not (tmp_path / "b").exists()


def test_adapters_are_not_padded_where_the_server_adds_up_messages():
    method = algorithms.fedadmm(lambda params, examples, key: examples.y, client_lr=0.1)
    with pytest.raises(ValueError, match=r"fedadmm, whose server adds up .* must be 'changes'"):
        with_ranks(method, [1, 2])
    assert with_ranks(method, [1, 2], padded="changes").hyperparameters["padded"] == "changes"
