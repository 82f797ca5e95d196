import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_lab.command.build import build_algorithm
from fedjax_lab.command.client_scores import summarise_clients
from fedjax_lab.command.commands import parse
from fedjax_lab.command.config import DEFAULTS, RunConfig
from fedjax_lab.command.config_file import format_settings, read_settings
from fedjax_lab.command.options import (
    algorithm_options,
    format_options,
    parse_options,
    server_lr_of,
)
from fedjax_lab.command.setup import build
from fedjax_lab.data import Devices, Examples
from fedjax_lab.data.cohort import Schedule
from fedjax_lab.report import settings_table
from fedjax_lab.report.settings import SETTINGS
from tests.algorithms import problem as softmax
from tests.federations import batch_of, distance_loss
from tests.reference import problem as reference
from tests.reference.fafed_numpy import FAFED
from tests.reference.stem_numpy import STEM
from tests.tiers import few

CONFIG = RunConfig.of(
    algorithm="gradma",
    option=("memory_size=7", "keep_local_model=true", "qp_scope=per_leaf", "margin=0.25"),
    model_option=("hidden=8,4", "norm=none"),
    server_lr=0.5,
    local_epochs=2,
    flip=True,
    partition_seed=3,
)


def test_dict_and_json_take_a_config_there_and_back(tmp_path):
    values = CONFIG.to_dict()
    assert values["option"] == {
        "memory_size": 7,
        "keep_local_model": True,
        "qp_scope": "per_leaf",
        "margin": 0.25,
    }
    assert values["model_option"] == {"hidden": [8, 4], "norm": None}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(values))
    assert RunConfig.from_file(file) == CONFIG
    assert RunConfig.from_dict(RunConfig().to_dict()) == RunConfig()


def test_yaml_takes_a_config_there_and_back(tmp_path):
    file = tmp_path / "config.yml"
    file.write_text(format_settings(CONFIG.to_dict(), "yaml"))
    assert RunConfig.from_file(file) == CONFIG
    file.write_text(
        """
        # comments are what YAML is for
        client_lr: 1e-3
        server_lr: 2.5E+1
        clip_norm: .5e0
        dataset: idx:1e3
        log: [csv]
        option: {margin: 0.25, keep_local_model: true, memory_size: 7}
        """
    )
    config = RunConfig.from_file(file)
    assert (config.method.client_lr, config.method.server_lr, config.method.clip_norm) == (
        0.001,
        25.0,
        0.5,
    )
    assert (config.data.dataset, config.output.log) == ("idx:1e3", ("csv",))
    assert config.method.option == ("margin=0.25", "keep_local_model=true", "memory_size=7")
    file.write_text("# nothing\n")
    assert RunConfig.from_file(file) == RunConfig()


@pytest.mark.parametrize("text", ["1e5", "-.5E+3", "1.e2", "1:30", "017", "true", "<<", "~"])
def test_text_that_looks_like_another_value_stays_text(text, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(format_settings({"target": [text], "client": text, "client_lr": 1e-5}, "yaml"))
    assert read_settings(file) == {"target": [text], "client": text, "client_lr": 1e-5}


@pytest.mark.parametrize("name", ["config.yaml", "config.json"])
def test_a_byte_order_mark_is_no_setting(name, tmp_path):
    """As programs of Windows write it."""
    (tmp_path / name).write_text(json.dumps({"rounds": 5}), encoding="utf-8-sig")
    assert read_settings(tmp_path / name) == {"rounds": 5}


def test_a_run_directorys_config_is_read_as_settings(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"algorithm": "gradma", "run_config": CONFIG.record()}))
    assert RunConfig.from_file(file) == CONFIG


def test_every_setting_is_a_flag_with_help_and_in_one_group(capsys):
    names = [name for group in vars(RunConfig()).values() for name in vars(group)]
    assert len(names) == len(set(names)) == len(DEFAULTS)
    with pytest.raises(SystemExit):
        parse(["run", "--help"])
    shown = re.sub(r"[│\s]+", " ", capsys.readouterr().out)
    for name in names:
        flag = "--" + name.replace("_", "-")
        words = r"(?: \S*(?:STR|INT|FLOAT)\S*(?: \.\.\.)?| \[.*?\]\])?"
        about = re.search(rf" {flag}(?:(?: \.\.\.)?, \S+)?{words} ([A-Z])", shown)
        assert about, name


# The settings of version 0.3 that are no places on the disk.
OF_0_3 = """
algorithm option client_lr client_lr_schedule server_lr as_published clip_norm weight_decay clip
compressor error_feedback downlink_compressor model model_option compute_dtype init_seed dataset
sequence_length vocabulary_size partition num_clients min_client_size partition_seed flip crop
rounds cohort_size local_steps local_epochs batch_size replace full_examples weights
eval_every on_nonfinite seed min_local_steps time_budget step_time step_time_spread dropout times
over_selection deadline concurrency client_map client_store
"""


def test_the_record_leaves_places_on_the_disk_out():
    places = {"run_dir": "a", "data_dir": "b", "checkpoint_every": 3, "log": ("csv",)}
    config = CONFIG.replace(**places, profile_dir="c")
    assert config.record() == CONFIG.record()
    # Later ones are recorded if they are given, so that older runs have equal records.
    assert set(config.record()) == set(OF_0_3.split())
    for name, value in (("sampling", "cyclic"), ("dp_delta", 0.1), ("lowering", "lax")):
        assert config.replace(**{name: value}).record() == {**CONFIG.record(), name: value}


def test_what_a_report_knows_of_settings_is_so():
    of_an_attack = {"attack_share", "attack_strength"}  # run_config has its text
    assert set(SETTINGS) - of_an_attack <= DEFAULTS.keys()
    assert settings_table._DEFAULTS.items() <= DEFAULTS.items()
    assert DEFAULTS.keys() >= {
        *settings_table._NEEDS,
        *settings_table._NEEDS.values(),
        *settings_table._OF_TEXT,
    }


@pytest.mark.parametrize(
    ("values", "error", "parts"),
    [
        (
            {"roundz": 3},
            ValueError,
            ["roundz is not a setting", "Did you mean 'rounds'", "client_lr"],
        ),
        ({"rounds": "3"}, TypeError, ["rounds is '3'; it must be an integer"]),
        ({"rounds": True}, TypeError, ["rounds is True; it must be an integer"]),
        ({"flip": 1}, TypeError, ["flip is 1; it must be true or false"]),
        ({"client_lr": None}, TypeError, ["client_lr is None; it must be a number"]),
        ({"log": 3}, TypeError, ["log is 3", '["name", ...]']),
        ({"option": 1}, TypeError, ["option is 1", "{name: value}"]),
        ({"lr": 0.1}, ValueError, ["Did you mean 'client_lr'?"]),
    ],
)
def test_wrong_keys_and_types_are_refused(values, error, parts):
    with pytest.raises(error) as caught:
        RunConfig.from_dict(values)
    assert all(part in str(caught.value) for part in parts)


def test_a_text_is_a_list_of_one_as_on_the_command_line():
    config = RunConfig.from_dict({"target": "y", "option": "mu=0.1"})
    assert (config.data.target, config.method.option) == (("y",), ("mu=0.1",))


def test_an_integer_is_a_number():
    config = RunConfig.from_dict({"client_lr": 1, "server_lr": 2})
    assert (config.method.client_lr, type(config.method.client_lr), config.method.server_lr) == (
        1.0,
        float,
        2.0,
    )


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("-2", -2),
        ("3.0", 3.0),
        ("1e-3", 0.001),
        ("true", True),
        ("False", False),
        ("none", None),
        ("II", "II"),
        ("64,32", (64, 32)),
        ("64,", (64,)),
        (",", ()),
    ],
)
def test_option_values(text, value):
    parsed = parse_options([f"name={text}"])["name"]
    assert parsed == value
    assert type(parsed) is type(value)
    assert parse_options(format_options({"name": value})) == {"name": value}


def test_the_last_of_equal_options_counts():
    assert parse_options(["a=1", "b=2", "a=3"]) == {"a": 3, "b": 2}


def test_a_client_that_spoils_the_normalisation_is_named():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 3, 3, 1)).astype(np.float32)
    y = np.arange(40, dtype=np.int32) % 2
    config = RunConfig.of(num_clients=4, cohort_size=2, partition="iid", client_map="scan")
    train, test = Examples(x, y), Examples(x[:4], y[:4])
    clients = build(config, (train, test)).clients  # without a word
    x = x.copy()
    x[np.asarray(clients.indices)[-1]] = 1e6  # of the last client
    with pytest.warns(UserWarning, match=r"the clients 3 have values up to 1e\+06, more than 1000"):
        build(config, (Examples(x, y), test))


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ((0, 1200), "labels are up to 1200, and only 2 of these numbers occur .*; 1, for example"),
        ((1, 2), "labels are up to 2, and only 2 of these numbers occur .*; 0, for example"),
        ((0, 0), None),
    ],
)
def test_labels_that_are_no_numbers_of_classes_are_told(labels, message):
    x = np.zeros((40, 3, 3, 1), np.float32)
    y = np.array(labels, np.int32)[np.arange(40) % 2]
    config = RunConfig.of(num_clients=4, cohort_size=2, partition="iid", client_map="scan")
    if message is None:
        with pytest.raises(ValueError, match=r"digits: every label is 0; .* needs two classes"):
            build(config, (Examples(x, y), Examples(x, y)))
        return
    with pytest.warns(UserWarning, match=message):
        build(config, (Examples(x, y), Examples(x, y)))


@pytest.mark.parametrize("text", ["a", "=1", "a=", "a b=1"])
def test_options_must_be_name_value(text):
    with pytest.raises(ValueError, match=r"option is .*; it must be of the form name=value"):
        parse_options([text])


def test_resolve_fills_in_what_depends_on_other_settings():
    resolved = RunConfig.of(algorithm="gradma").resolve()
    assert resolved.rounds.local_steps == 5
    assert resolved.method.option == ("memory_size=20",)
    assert resolved.output.run_dir == "runs/gradma-digits-dirichlet0.1-seed0"
    assert RunConfig.of(local_epochs=1).resolve().rounds.local_steps is None
    large = RunConfig.of(algorithm="gradma_s", num_clients=150).resolve()
    assert large.method.option == ("memory_size=100",)
    given = RunConfig.of(algorithm="gradma", option=("memory_size=6",)).resolve()
    assert given.method.option == ("memory_size=6",)
    assert resolved.resolve() == resolved


def test_run_names_are_readable_and_safe():
    config = RunConfig.of(
        algorithm="fedopt",
        dataset="npz:/some where/my set.npz",
        partition="classes_per_client:2",
        server_lr=0.01,
        option=("server_optimizer=yogi",),
        model_option=("hidden=32,",),
        seed=4,
    )
    assert config.run_name() == (
        "fedopt-npz-myset-classes_per_client2-server_lr0.01-server_optimizeryogi-hidden32-seed4"
    )


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"algorithm": "fedavgg"}, ["algorithm is 'fedavgg'", "Did you mean 'fedavg'"]),
        ({"model": "nlp"}, ["model is 'nlp'", "Did you mean 'mlp'"]),
        ({"dataset": "digts"}, ["dataset is 'digts'", "Did you mean 'digits'"]),
        ({"partition": "dirichlt:1"}, ["partition is 'dirichlt'", "Did you mean 'dirichlet'"]),
        ({"compute_dtype": "float16"}, ["compute_dtype is 'float16'", "bfloat16, float32"]),
        ({"weights": "size"}, ["weights is 'size'", "examples, uniform"]),
        ({"client_map": "chunk:0"}, ["chunk:0"]),
        ({"cohort_size": 21}, ["cohort_size is 21; it must be between 1 and 20"]),
        ({"rounds": 0}, ["rounds is 0; it must be between 1 and 2147483647"]),
        ({"seed": -1}, ["seed is -1; it must be between 0 and 4294967295"]),
        ({"clip_norm": 0.0}, ["clip_norm is 0.0", "greater than 0"]),
        ({"local_steps": 1, "local_epochs": 1}, ["local_steps is 1 and local_epochs 1; set one"]),
        (
            {"algorithm": "gradma", "option": ("memory_sise=3",)},
            [
                "memory_sise is not an option of gradma. Did you mean 'memory_size'",
                "server_momentum=0.9",
                "memory_size (num_clients, at most 100)",
            ],
        ),
        ({"option": ("momentum=0.5",)}, ["momentum is not an option of fedavg", "Allowed: none"]),
        ({"model_option": ("hiden=3",)}, ["hiden is not an option of the model mlp", "'hidden'"]),
        ({"algorithm": "fedadam"}, ["fedadam needs a server learning rate: give --server-lr"]),
        ({"algorithm": "fedopt"}, ["fedopt needs a server learning rate"]),
        (
            {"algorithm": "fedopt", "server_lr": 0.1, "option": ("server_optimizer=adm",)},
            ["server_optimizer is 'adm'", "Did you mean 'adam'", "momentum, sgd, yogi"],
        ),
        (
            {"algorithm": "fedopt", "server_lr": 0.1, "option": ("momentum=0.5",)},
            ["momentum is not an option of fedopt", "b1=0.9"],
        ),
    ],
)
def test_mistakes_name_the_setting_and_the_nearest_valid_ones(settings, parts):
    with pytest.raises(ValueError, match=" ") as caught:
        RunConfig.of(**settings).resolve()
    for part in parts:
        assert part in str(caught.value)


def test_options_are_the_factorys_own():
    assert algorithm_options("fedavg") == {}
    assert algorithm_options("scaffold") == {"control_update": "II", "mean_from": "gradients"}
    assert algorithm_options("fedopt", "momentum") == {
        "server_optimizer": "adam",
        "momentum": 0.9,
        "nesterov": False,
    }
    assert [server_lr_of(name) for name in ("fedavg", "fedyogi", "fedopt")] == [
        "1.0",
        "required",
        "required",
    ]


def _rounds(config, count, steps=1):
    """x after rounds of one client whose gradient is (30, 40), starting at (3, 4)."""
    algorithm = build_algorithm(config.resolve(), lambda x, examples, key: examples @ x)
    state = algorithm.init(jnp.array([3.0, 4.0]), num_clients=1)
    round_fn = jax.jit(algorithm.round_fn)
    for round in range(count):
        examples = jnp.tile(jnp.array([30.0, 40.0]), (1, steps, 1, 1))
        state, _ = round_fn(state, batch_of(examples, round))
    return np.asarray(algorithm.params(state))


def test_clipping_comes_before_weight_decay():
    # (30, 40) clipped to norm 1 is (0.6, 0.8); decay adds (1.5, 2).
    config = RunConfig.of(client_lr=1.0, clip_norm=1.0, weight_decay=0.5)
    np.testing.assert_allclose(_rounds(config, 1), [0.9, 1.2], rtol=1e-6)


@pytest.mark.parametrize(("clip", "end"), [("gradient", [1.875, 2.5]), ("step", [2.1, 2.8])])
def test_clip_says_what_is_clipped(clip, end):
    # FedNova's second v is 0.5 v + g: of clipped gradients the way is (0.6, 0.8) + (0.9, 1.2),
    # while two clipped steps make (1.2, 1.6).
    options = ("local_momentum=0.5",)
    config = RunConfig.of(
        algorithm="fednova", client_lr=0.75, clip_norm=1.0, clip=clip, option=options
    )
    config = config.replace(local_steps=2)
    np.testing.assert_allclose(_rounds(config, 1, steps=2), end, rtol=1e-6)


def test_fedspeed_as_published_clips_its_step_without_the_decay():
    # (30, 40) - 0.1 x is clipped to (6, 8), and 0.101 x added: y = x - 0.1 (6.303, 8.404). With
    # one client the mean of all duals doubles the way.
    config = RunConfig.of(algorithm="fedspeed", client_lr=0.1, as_published=True)
    np.testing.assert_allclose(_rounds(config, 1), [3 - 1.2606, 4 - 1.6808], rtol=1e-6)
    unclipped = config.replace(clip_norm=1e6, weight_decay=0.0)
    np.testing.assert_allclose(_rounds(unclipped, 1), [3 - 6, 4 - 8], rtol=1e-5)


def test_settings_of_a_published_code_are_defaults():
    config = RunConfig.of(algorithm="fedadam", as_published=True, option=("tau=0.1",)).resolve()
    assert (config.method.server_lr, config.method.clip_norm, config.method.weight_decay) == (
        0.1,
        10.0,
        1e-3,
    )
    assert config.method.option == ("tau=0.1", "initial_second_moment=0.0")
    assert config.resolve() == config
    assert "as_published" in config.run_name()
    given = RunConfig.of(
        algorithm="fedadam", as_published=True, server_lr=0.5, weight_decay=0.0
    ).resolve()
    assert (given.method.server_lr, given.method.weight_decay) == (0.5, 0.0)
    with pytest.raises(ValueError, match="as_published: algorithm is 'fednova'"):
        RunConfig.of(algorithm="fednova", as_published=True).resolve()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clip": "step"}, "give one of them"),
        ({"clip": "all", "clip_norm": 1.0}, "must be one of gradient, step"),
        ({"clip": "step", "clip_norm": 1.0, "as_published": True}, "the published code decides"),
    ],
)
def test_a_clip_without_a_meaning_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        RunConfig.of(**settings).resolve()


@pytest.mark.parametrize(
    ("algorithm", "twin", "schedule", "rate"),
    few(
        1,
        [
            ("stem", STEM, "cosine", lambda t: 0.1 * (1 + np.cos(np.pi * t / (3 * 4)))),
            ("fafed", FAFED, "exponential:0.5", lambda t: 0.2 * 0.5 ** (t / 3)),
        ],
    ),
)
def test_a_schedule_is_of_the_rounds_where_the_rate_is_of_the_local_step(
    algorithm, twin, schedule, rate, x64
):
    """Four ragged rounds of at most three local steps, which the twins count."""
    options = {"momentum": 0.3} | ({"second_moment_decay": 0.9} if algorithm == "fafed" else {})
    config = RunConfig.of(
        algorithm=algorithm,
        option=tuple(f"{name}={value}" for name, value in options.items()),
        client_lr=0.2,
        client_lr_schedule=schedule,
        rounds=4,
    )
    method = build_algorithm(config.resolve(), softmax.loss_fn)
    drawn = reference.make_rounds(5, 4, cohort_size=4, max_steps=3, batch_size=4)
    start, count = reference.initial_point(), reference.NUM_CLIENTS
    theirs = twin(start, count, reference.gradient, client_lr=rate, steps_per_round=3, **options)
    for t, (clients, _) in enumerate(drawn):
        theirs.round(clients, t)
    state = method.init(softmax.initial_params(), count)
    state, metrics = softmax.run_rounds(method.round_fn, state, drawn)
    np.testing.assert_allclose(softmax.flat(method.params(state)), theirs.x, rtol=0, atol=1e-6)
    assert (metrics["delta_norm"] > 0).all()  # the model moves to the end


def test_fedopt_takes_an_optimizer_with_its_options():
    # delta = (3, 4) each round; the momentum of two rounds is 1 + 1.5 of it.
    options = ("server_optimizer=momentum", "momentum=0.5")
    config = RunConfig.of(algorithm="fedopt", client_lr=0.1, server_lr=0.2, option=options)
    np.testing.assert_allclose(_rounds(config, 2), [3 - 0.2 * 7.5, 4 - 0.2 * 10], rtol=1e-6)


@pytest.mark.parametrize("algorithm", few(1, ["moon", "fedmlbm"]))
def test_methods_that_look_inside_take_the_model(algorithm):
    assert not {"model", "preprocess"} & set(algorithm_options(algorithm))
    setup = build(RunConfig.of(algorithm=algorithm, option=("temperature=0.25",)))
    assert setup.algorithm.hyperparameters["temperature"] == 0.25
    batch = batch_of(jnp.zeros((2, 3, 4), jnp.int32), source=setup.clients.examples)
    state = setup.algorithm.init(setup.params, num_clients=20)
    after, _ = jax.eval_shape(setup.algorithm.round_fn, state, batch)  # traced, not compiled
    assert jax.tree.structure(after) == jax.tree.structure(state)
    with pytest.raises(ValueError, match="fedmlb needs at least 2"):
        build(RunConfig.of(algorithm="fedmlb", model="linear"))


@pytest.mark.parametrize("lowering", ["auto", "lax"])
def test_the_evaluations_take_the_lowering(lowering):
    small = {"model": "lenet5", "model_option": ("padding=SAME", "widths=2,2,4,4")}
    setup = build(RunConfig.of(algorithm="fedavg", **small, lowering=lowering))
    tests = setup.client_tests.score_clients
    tests(setup.params)  # divides the test set
    for evaluate in (setup.evaluate, setup.evaluate_clients, tests):
        program = str(jax.make_jaxpr(evaluate)(setup.params))
        assert ("conv_general_dilated" in program) == (lowering == "lax")


@pytest.mark.parametrize("algorithm", ["moon", "fedmlbm", "scaffold"])
def test_the_compute_dtype_reaches_every_part_and_nothing_that_is_kept(algorithm):
    config = RunConfig.of(algorithm=algorithm, compute_dtype="bfloat16").resolve()
    assert config.record()["compute_dtype"] == "bfloat16"
    assert "compute_dtypebfloat16" in config.run_name()
    setup = build(config)
    batch = batch_of(jnp.zeros((2, 3, 4), jnp.int32), source=setup.clients.examples)
    state = setup.algorithm.init(setup.params, num_clients=20)
    traced = jax.make_jaxpr(setup.algorithm.round_fn)(state, batch)
    products = re.findall(r":(\w+)\[[^\]]*\] = dot_general", str(traced))
    assert "bf16" in products
    after, _ = jax.eval_shape(setup.algorithm.round_fn, state, batch)
    assert jax.tree.map(jnp.result_type, after) == jax.tree.map(jnp.result_type, state)


def test_server_lr_reaches_the_method():
    config = RunConfig.of(client_lr=0.1, server_lr=0.5)
    np.testing.assert_allclose(_rounds(config, 1), [1.5, 2.0], rtol=1e-6)


def test_the_worst_tenth_of_the_clients():
    # 11 clients with data: the worst 2 count; the one without data does not.
    accuracy = np.array([0.9, 0.1, np.nan, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 1.0, 0.0])
    summary = summarise_clients(accuracy)
    assert summary["worst_10_percent_accuracy"] == pytest.approx(0.05)
    assert summary["client_accuracy_mean"] == pytest.approx(0.5)
    assert summary["client_accuracy"][2] is None
    assert summary["client_accuracy"][0] == 0.9
    json.dumps(summary, allow_nan=False)


def test_a_client_whose_error_is_infinite_is_in_the_worst_tenth():
    error = np.array([0.5, np.nan, 0.1, np.inf] + [0.0] * 8)  # 11 clients with data
    summary = summarise_clients(error, "mean_squared_error")
    assert summary["worst_10_percent_mean_squared_error"] is None
    assert summary["client_mean_squared_error_mean"] is None
    assert summary["client_mean_squared_error"][:4] == [0.5, None, 0.1, None]
    json.dumps(summary, allow_nan=False)
    error[3] = 0.3
    summary = summarise_clients(error, "mean_squared_error")
    assert summary["worst_10_percent_mean_squared_error"] == pytest.approx(0.4)


def test_devices_compressors_and_schedules_become_arguments():
    assert RunConfig().clock.devices() is None
    config = RunConfig.of(time_budget=3.0, step_time_spread=0.5, dropout=0.1).resolve()
    assert config.clock.devices() == Devices(time_budget=3.0, step_time_spread=0.5, dropout=0.1)
    assert "time_budget3.0" in config.run_name()

    config = RunConfig.of(
        algorithm="scaffold",
        compressor="top_k:0.5",
        error_feedback=False,
        client_lr=0.2,
        client_lr_schedule="exponential:0.5",
    ).resolve()
    algorithm = build_algorithm(config, distance_loss)
    assert algorithm.name == "scaffold+top_k"
    # Two fields of 4 floats, of which 2 are sent with indices of 2 bits.
    assert algorithm.uplink({"w": jnp.zeros(4)}) == 2 * (2 * 4 + 1)
    plain = build_algorithm(config.replace(compressor=None), distance_loss)
    state = plain.init({"w": jnp.zeros(2)}, 1)
    round_fn = jax.jit(plain.round_fn)
    moves = []
    for t in (0, 3):
        after, _ = round_fn(state, batch_of(jnp.ones((1, 1, 1, 2)), t))
        moves.append(np.asarray(plain.params(after)["w"]))
    np.testing.assert_allclose(moves, [[0.4, 0.4], [0.05, 0.05]], rtol=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"compressor": "top_l:0.9"}, "Did you mean 'top_k'"),
        ({"downlink_compressor": "top_k:2"}, "comp is 2.0; .* less than 1"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"min_local_steps": 0}, "min_local_steps is 0"),
    ],
)
def test_wrong_devices_and_compressors(settings, message):
    with pytest.raises(ValueError, match=message):
        RunConfig.of(**settings).resolve()


def test_each_option_of_a_schedule_is_a_setting_and_reaches_the_run():
    """``devices`` is made of several settings; samplers and constants are Python's alone."""
    options = set(Schedule._fields) - {"devices", "sample_cohort", "client_constants"}
    config = RunConfig.of(sampling="poisson", cohort_size=3, weights="examples", replace=True)
    passed = config.schedule()
    assert options <= passed.keys()
    assert [passed[n] for n in ("sampling", "cohort_size", "weights", "replace")] == [
        *("poisson", 3, "examples", True)
    ]


def test_a_setting_in_place_of_a_group_is_refused():
    with pytest.raises(TypeError, match=r"rounds is 3; .* RunConfig.of\(rounds=3\)"):
        RunConfig(rounds=3)


def test_a_weight_decay_of_ones_own_stays_where_the_published_code_chooses_the_clipping():
    config = RunConfig.of(algorithm="fedavg", as_published=True, weight_decay=0.1).resolve()
    assert (config.method.clip_norm, config.method.weight_decay) == (10.0, 0.1)
