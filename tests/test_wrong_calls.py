"""A hundred wrong calls of the Python API: each error names the argument and says what is allowed.

The words of a case are what its message must contain: the argument, the value or its type, and what
would have been right.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import fedjax_lab
from fedjax_lab import (
    algorithms,
    build_evaluation,
    build_round,
    compressors,
    data,
    load_run,
    models,
    plan,
    privacy,
    simulate,
    sweep,
    tune,
    with_attack,
    with_buffered_aggregation,
    with_client_metrics,
    with_compression,
    with_dp,
    with_frozen,
    with_personal,
    with_robust_aggregation,
    with_secure_aggregation,
)
from fedjax_lab.simulation.evaluate import build_client_evaluation
from fedjax_lab.simulation.evaluate_personal import (
    build_personal_evaluation,
    client_models,
    personal_scores,
)

MODEL = models.linear(3)
X, Y = np.arange(36, dtype=np.float32).reshape(12, 3), np.arange(12, dtype=np.int32) % 3
EXAMPLES = data.Examples(X, Y)


def loss(params, examples, key):
    return jnp.square(examples.x @ params["w"] - examples.y)


def two_arguments(params, batch):
    return params


A = algorithms
LOSS = {"client_lr": 0.1}
SCHEDULE = {"rounds": 1, "cohort_size": 2, "local_steps": 1, "batch_size": 2}


@functools.cache
def clients():
    return data.partition(EXAMPLES, "iid", 4)


def params():
    return {"w": jnp.zeros(3)}


def fedavg(**more):
    return A.fedavg(loss, **LOSS | more)


def run(**changes):
    given = {"algorithm": fedavg(), "params": params(), "clients": clients()}
    return simulate(**given | SCHEDULE | changes)


def swept(**changes):
    given = {"build": functools.partial(A.fedavg, loss), "points": {"client_lr": [0.1]}}
    return sweep(**given | {"params": params(), "clients": clients()} | SCHEDULE | changes)


def tuned(**changes):
    given = {
        "methods": {"fedavg": functools.partial(A.fedavg, loss)},
        "space": {"client_lr": (0.01, 1.0)},
    }
    given |= {"params": params(), "clients": clients()} | SCHEDULE | {"rounds": 2}
    return tune(**given | changes)


def planned(**changes):
    given = {"algorithm": fedavg(), "params": params(), "clients": clients()}
    schedule = {name: value for name, value in SCHEDULE.items() if name != "rounds"}
    return plan(**given | schedule | changes)


TABLE = {"who": ["a", "a", "b"], "age": [1.0, 2.0, 3.0], "out": [0, 1, 0]}
RATES = np.array([0.1, 0.2])


def masked(transform):
    """The first round of clients that transform one leaf."""
    return run(algorithm=fedavg(step_transform=optax.masked(transform, {"w": True})))


def two_optimizers(name):
    """Clients whose leaves have an optimizer each, with a learning rate."""
    both = optax.multi_transform({"a": optax.adam(0.1), "b": optax.scale(5.0)}, {"w": "a"})
    return run(algorithm=fedavg(**{name: both}))


def drawn(sampler):
    return run(sample_cohort=sampler)


def scored(counts, test=EXAMPLES):
    return build_evaluation(counts, test)(params())


def called(score, perplexity=False):
    """A function that counts, with a name of its score."""

    def counts(params, examples):
        return examples.y, examples.y

    counts.score, counts.perplexity = score, perplexity
    return counts


def own_models(counts=two_arguments, model_of=None, tests=None, state=None):
    """Scores of the clients' own models, which are the global one."""
    model_of = client_models(fedavg()) if model_of is None else model_of
    evaluate = build_personal_evaluation(counts, model_of, clients() if tests is None else tests)
    return evaluate(fedavg().init(params(), 4) if state is None else state)


def by_python(round):
    return 0.1 if round < 3 else 0.01


def table(**changes):
    return data.from_table(**{"table": TABLE, "client": "who", "x": "age", "y": "out"} | changes)


FACTORIES = [
    # The papers' symbols.
    (lambda: A.fedprox(loss, client_lr=0.1, mu=0.1), ["'mu'", "is 'prox_weight'"]),
    (lambda: A.feddyn(loss, client_lr=0.1, alpha=0.1), ["'alpha'", "is 'prox_weight'"]),
    (lambda: A.fedadmm(loss, client_lr=0.1, rho=0.1), ["'rho'", "is 'prox_weight'"]),
    (lambda: A.fedpd(loss, client_lr=0.1, p=0.1), ["'p'", "p is 'skip_probability'"]),
    (lambda: A.scaffold(loss, eta_l=0.1), ["'eta_l'", "is 'client_lr'"]),
    (lambda: A.scaffold(loss, client_lr=0.1, eta_g=1.0), ["'eta_g'", "is 'server_lr'"]),
    (lambda: A.fedacg(loss, client_lr=0.1, beta=0.1), ["'beta'", "is 'prox_weight'"]),
    (lambda: A.fedacg(loss, client_lr=0.1, lam=0.1), ["'lam'", "is 'momentum'"]),
    (lambda: A.mimelite(loss, client_lr=0.1, beta=0.1), ["'beta'", "is 'momentum'"]),
    (lambda: A.fedcm(loss, client_lr=0.1, alpha=0.1), ["'alpha'", "is 'mixing'"]),
    (lambda: A.fedspeed(loss, client_lr=0.1, lamda=10.0), ["'lamda'", "is 'prox_weight'"]),
    (lambda: A.fedspeed(loss, client_lr=0.1, rho=0.1), ["'rho'", "'perturbation_radius'"]),
    (lambda: A.fedsam(loss, client_lr=0.1, rho=0.1), ["'rho'", "is 'perturbation_radius'"]),
    (lambda: A.fedasam(loss, client_lr=0.1, eta=0.1), ["'eta'", "is 'stability'"]),
    (lambda: A.fedsmoo(loss, client_lr=0.1, beta=0.1), ["'beta'", "is 'prox_weight'"]),
    (lambda: A.fedswa(loss, client_lr=0.1, alpha=1.5), ["'alpha'", "is 'server_lr'"]),
    (lambda: A.fedmoswa(loss, client_lr=0.1, gamma=0.2), ["'gamma'", "is 'momentum'"]),
    (lambda: A.gradma(loss, client_lr=0.1, memory_size=2, beta_2=0.5), ["is 'memory_decay'"]),
    (lambda: A.gradma_s(loss, client_lr=0.1, m=2), ["'m'", "m is 'memory_size'"]),
    (lambda: A.fedadam(loss, client_lr=0.1, server_lr=1.0, beta_1=0.9), ["is 'beta1'"]),
    (lambda: A.fednova(loss, client_lr=0.1, rho=0.9), ["'rho'", "is 'local_momentum'"]),
    (lambda: A.fafed(loss, client_lr=0.1, alpha_t=0.9), ["'alpha_t'", "is 'momentum'"]),
    (lambda: A.stem(loss, client_lr=0.1, a=0.9), ["'a'", "a_t is 'momentum'"]),
    (lambda: A.moon(MODEL, client_lr=0.1, mu=1.0), ["'mu'", "is 'contrastive_weight'"]),
    (lambda: A.moon(MODEL, client_lr=0.1, tau=1.0), ["'tau'", "is 'temperature'"]),
    (
        lambda: A.fedmlb(MODEL, client_lr=0.1, lam=1.0),
        ["is 'hybrid_ce_weight'", "is 'hybrid_kl_weight'"],
    ),
    (lambda: A.ditto(loss, client_lr=0.1, lam=1.0), ["'lam'", "is 'prox_weight'"]),
    (lambda: A.pfedme(loss, client_lr=0.1, beta=1.0), ["'beta'", "is 'server_lr'"]),
    (lambda: A.apfl(loss, client_lr=0.1, alpha=1.0), ["'alpha'", "is 'mixing'"]),
    (lambda: A.fedrep(loss, client_lr=0.1, tau=1), ["'tau'", "is 'head_steps'"]),
    # Other libraries' words, slips, and what belongs elsewhere.
    (lambda: A.fedavg(loss, lr=0.1), ["'lr'", "did you mean 'client_lr'"]),
    (lambda: A.fedavg(loss, learning_rate=0.1), ["'learning_rate'", "'client_lr'"]),
    (lambda: A.fedavg(loss, clent_lr=0.1), ["'clent_lr'", "did you mean 'client_lr'"]),
    (lambda: A.fedavg(loss, client_lr=0.1, global_lr=1.0), ["'global_lr'", "'server_lr'"]),
    (lambda: A.fedavg(loss, client_lr=0.1, local_steps=5), ["'local_steps'", "of simulate"]),
    (lambda: A.fedavg(loss, client_lr=0.1, epochs=5), ["'epochs'", "'local_epochs'", "simulate"]),
    (lambda: A.fedavg(loss, client_lr=0.1, clip_norm=5), ["'clip_norm'", "gradient_transform="]),
    (lambda: A.fedavg(loss, client_lr=0.1, weights="examples"), ["'weights'", "of simulate"]),
    (lambda: A.fedavg(loss), ["fedavg()", "client_lr"]),
    (lambda: A.fedavg(MODEL, client_lr=0.1), ["loss_fn", "Model", "classification_loss"]),
    (lambda: A.fedavg(None, client_lr=0.1), ["loss_fn", "NoneType", "classification_loss"]),
    (lambda: A.fedavg(two_arguments, client_lr=0.1), ["loss_fn", "(params, batch)", "key"]),
    (lambda: A.moon(loss, client_lr=0.1), ["model", "loss", "models.mlp()"]),
    (lambda: A.fedavg(loss, client_lr=-1), ["client_lr is -1", "at least 0"]),
    (lambda: A.fedavg(loss, client_lr="0.1"), ["client_lr is '0.1'", "number"]),
    (
        lambda: A.fedavg(loss, client_lr=0.1, gradient_transform=optax.adam(0.1)),
        ["gradient_transform", "optax.scale_by_adam"],
    ),
    (lambda: A.fedavg(loss, client_lr=0.1, step_transform=3), ["step_transform is 3", "optax"]),
    (lambda: A.fedavgm(loss, client_lr=0.1, momentum=2), ["momentum is 2", "at most 1"]),
    (
        lambda: A.scaffold(loss, client_lr=0.1, control_update="III"),
        ["control_update is 'III'", "I, II"],
    ),
    (lambda: A.as_published("fedavgg", loss, client_lr=0.1), ["name is 'fedavgg'", "fedspeed"]),
    (lambda: A.cfedavg(loss, client_lr=0.1, compressor="zip"), ["compressor is 'zip'", "top_k"]),
]

SIMULATIONS = [
    (lambda: run(num_rounds=5), ["'num_rounds'", "did you mean 'rounds'"]),
    (lambda: run(evalute=None), ["'evalute'", "did you mean 'evaluate'"]),
    (lambda: run(clients_per_round=2), ["'clients_per_round'", "'cohort_size'"]),
    (lambda: run(epochs=2), ["'epochs'", "'local_epochs'"]),
    (lambda: run(lr=0.1), ["'lr'", "It takes algorithm"]),
    (lambda: run(algorithm=A.fedavg), ["algorithm is fedavg", "client_lr"]),
    (lambda: run(clients=EXAMPLES), ["clients is Examples", "data.partition"]),
    (lambda: run(params=None), ["params is None", "initial global model"]),
    (lambda: run(rounds=0), ["rounds is 0", "between 1"]),
    (lambda: run(rounds=1.5), ["rounds is 1.5", "integer"]),
    (lambda: run(cohort_size=9), ["cohort_size is 9", "between 1 and 4"]),
    (lambda: run(local_epochs=1), ["local_steps is 1", "local_epochs 1", "exactly one"]),
    (lambda: run(weights="sizes"), ["weights is 'sizes'", "examples, uniform"]),
    (lambda: run(sampling="random"), ["sampling is 'random'", "poisson"]),
    (lambda: run(client_map="vmapp"), ["client_map is 'vmapp'", "vmap"]),
    (lambda: run(client_store="disk"), ["client_store is 'disk'", "host"]),
    (lambda: run(on_nonfinite="ignore"), ["on_nonfinite is 'ignore'", "exclude"]),
    (lambda: run(seed=-1), ["seed is -1", "between 0"]),
    (lambda: run(devices={"dropout": 0.1}), ["devices", "data.Devices"]),
    (lambda: planned(rounds=3), ["'rounds'", "It takes"]),
    (lambda: planned(target="h999"), ["h999", "h200"]),
    (
        lambda: planned(client_map="scan", client_store="sharded"),
        ["client_store is 'sharded'", "'scan'", "shard_map"],
    ),
    (lambda: swept(point={}), ["'point'", "did you mean 'points'"]),
    (lambda: swept(points={"lr": [0.1]}), ["points", "'lr'", "client_lr"]),
    (lambda: swept(points={"client_lr": 0.1}), ["points['client_lr'] is 0.1", "list"]),
    (lambda: swept(build=fedavg()), ["build is the Algorithm fedavg", "functools.partial"]),
    (lambda: swept(seed=0), ["'seed'", "did you mean 'seeds'"]),
    (lambda: swept(seeds=[1, 1]), ["seeds is [1, 1]", "none twice"]),
    (lambda: tuned(max_trials=3), ["'max_trials'", "budget"]),
    (lambda: tuned(space={"lr": (0.1, 1.0)}), ["'lr'", "client_lr"]),
    (lambda: tuned(space={"fedavg": {"lr": (0.1, 1.0)}}), ["'lr'", "client_lr"]),
    (lambda: tuned(space={"client_lr": (1.0, 0.1)}), ["space['client_lr']", "low < high"]),
    (lambda: tuned(rounds=1), ["rounds is 1", "at least 2"]),
    (lambda: tuned(sampler="tpa"), ["sampler is 'tpa'", "random, tpe"]),
    (lambda: tuned(hold_out="rounds"), ["hold_out is 'rounds'", "clients, examples"]),
    (lambda: tuned(validation=2.0), ["validation is 2.0", "less than 1"]),
    (lambda: tuned(methods=fedavg()), ["methods", "Algorithm", "functools.partial"]),
    (lambda: build_round(A.fedavg), ["algorithm is fedavg", "client_lr"]),
    (lambda: build_round(fedavg(), map="scan"), ["'map'", "client_map"]),
    (lambda: build_evaluation(None, EXAMPLES), ["count_fn is None", "accuracy_counts"]),
    (lambda: build_evaluation(models.accuracy_counts(MODEL.apply), EXAMPLES, batch=3), ["'batch'"]),
    (lambda: load_run("/nowhere"), ["/nowhere", "run"]),
    (lambda: load_run(path="/nowhere"), ["'path'", "run_dir"]),
]

WRAPPERS = [
    (lambda: with_dp(fedavg(), sigma=1.0, clip_norm=1.0), ["'sigma'", "'noise_multiplier'"]),
    (lambda: with_dp(fedavg(), max_grad_norm=1.0), ["'max_grad_norm'", "'clip_norm'"]),
    (lambda: with_dp(fedavg(), 0.0, 1.0), ["clip_norm is 0", "greater than 0"]),
    (lambda: with_dp(A.fedavg, 1.0, 1.0), ["algorithm is fedavg", "client_lr"]),
    (lambda: with_compression(fedavg(), "zip"), ["compressor is 'zip'", "top_k"]),
    (lambda: with_compression(fedavg(), "sign", errorfeedback=True), ["'error_feedback'"]),
    (lambda: with_compression(fedavg(), "top_k:2"), ["comp", "less than 1"]),
    (lambda: with_compression(loss, "sign"), ["algorithm is loss", "Algorithm"]),
    (lambda: with_robust_aggregation(fedavg(), "medain"), ["rule is 'medain'", "median"]),
    (lambda: with_robust_aggregation(fedavg(), rules="median"), ["'rules'", "'rule'"]),
    (lambda: with_secure_aggregation(fedavg(), bits=99, clip=1.0), ["bits is 99", "32"]),
    (lambda: with_secure_aggregation(fedavg(), bit=16), ["'bit'", "'bits'"]),
    (lambda: with_attack(fedavg(), "sign_flop", share=0.1), ["attack is 'sign_flop'", "sign_flip"]),
    (lambda: with_attack(fedavg(), "sign_flip", fraction=0.1), ["'fraction'", "share"]),
    (lambda: with_attack(fedavg(), "sign_flip", share=2.0), ["share is 2.0", "at most 1"]),
    (lambda: with_buffered_aggregation(fedavg(), 2, buffer=3), ["'buffer'", "'buffer_size'"]),
    (lambda: with_personal(fedavg(), lambda a, b: True), ["is_personal", "path"]),
    (lambda: with_personal(fedavg(), "head"), ["is_personal is 'head'", "path"]),
    (lambda: with_frozen(fedavg(), loss, params()), ["build", "Algorithm", "loss_fn"]),
    (
        lambda: with_frozen(functools.partial(A.fedavg, **LOSS), loss, params()),
        ["loss_fn takes (params, examples, key);", "frozen)"],
    ),
    (
        lambda: with_frozen(
            functools.partial(A.fedavg, **LOSS), lambda p, e, key, mask=None: e.y, params()
        ),
        ["loss_fn takes (p, e, key, mask=None)", "(params, examples, key, frozen)"],
    ),
    (lambda: with_client_metrics(fedavg(), drift=3), ["drift is 3", "params, gradient"]),
    (lambda: privacy.epsilon(1.0, 1e-5, 10, cohort=2, num_clients=9), ["'cohort'", "cohort_size"]),
    (lambda: compressors.top_k(2.0), ["comp is 2", "less than 1"]),
    (lambda: compressors.top_k(k=10), ["'k'", "'comp'"]),
    (lambda: compressors.qsgd(0), ["levels is 0", "between 1"]),
    (lambda: compressors.qsgd(bits=4), ["'bits'", "levels"]),
    (lambda: compressors.low_rank(0), ["rank is 0", "at least 1"]),
]

DATA = [
    (lambda: data.load("cifer10"), ["name is 'cifer10'", "'cifar10'"]),
    (lambda: data.load("digits", folder="."), ["'folder'", "data_dir"]),
    (lambda: data.partition(EXAMPLES, "dirichlett:1", 4), ["'dirichlett'", "'dirichlet'"]),
    (lambda: data.partition(EXAMPLES, "dirichlet:-1", 4), ["dirichlet:-1", "greater than 0"]),
    (lambda: data.partition(EXAMPLES, "iid", n_clients=4), ["'n_clients'", "'num_clients'"]),
    (lambda: data.partition(EXAMPLES, "iid"), ["num_clients is None", "iid", "integer"]),
    (lambda: data.partition(EXAMPLES, "iid", 7), ["num_clients is 7", "Lower"]),
    (lambda: data.partition(EXAMPLES, np.zeros(3)), ["spec", "[n]", "integers", "text"]),
    (lambda: data.partition(EXAMPLES, np.array(list("ab"))), ["spec", "2", "12"]),
    (lambda: data.from_clients([(X, Y)]), ["clients is a list", "mapping"]),
    (lambda: data.from_clients({"a": (X, Y)}, minsize=1), ["'minsize'", "'min_size'"]),
    (lambda: table(client="whom"), ["client is 'whom'", "'who'"]),
    (lambda: table(x=["age", "dose"]), ["x is 'dose'", "age"]),
    (lambda: data.from_table(TABLE, user="who", x="age", y="out"), ["'user'", "'client'"]),
    (lambda: data.from_table(TABLE, client="who", features="age", y="out"), ["'x'"]),
    (lambda: table(table=3), ["table is a int", "data frame"]),
    (lambda: table(table="users.xlsx"), ["table is 'users.xlsx'"]),
    (lambda: table(categories={"age": ["a"]}), ["categories", "'age'", "text"]),
    (lambda: data.split_clients(clients(), fraction=0.2), ["'fraction'", "held_out"]),
    (lambda: data.split_clients(clients(), 1.5), ["held_out is 1.5", "less than 1"]),
    (lambda: data.split_examples(clients(), 0.0), ["fraction is 0.0", "greater than 0"]),
    (lambda: data.stream(EXAMPLES, "iid", 4, min_sizes=3), ["'min_sizes'", "'min_size'"]),
    (lambda: data.Devices(dropot=0.1), ["Devices()", "'dropot'", "'dropout'"]),
    (lambda: data.Devices(dropout=2.0), ["dropout is 2.0", "less than 1"]),
    (lambda: data.preprocess(flips=True), ["'flips'", "'flip'"]),
    (lambda: data.synthetic.quadratics(clients=3), ["'clients'", "num_clients"]),
    (lambda: models.build("mpl", 10), ["name is 'mpl'", "'mlp'"]),
    (lambda: models.build("mlp", 10, width=3), ["width", "hidden"]),
    (lambda: models.classification_loss(MODEL), ["apply is a Model", "model.apply"]),
    (lambda: models.classification_loss(nn.Dense(3).apply), ["Dense", "models.from_linen"]),
    (
        lambda: models.accuracy_counts(lambda params, x: x),
        ["apply takes (params, x)", "(params, x, key)"],
    ),
    (lambda: models.from_linen(3), ["module is 3", "flax.linen.Module"]),
]

SIGNS_AND_SCHEDULES = [
    (lambda: masked(optax.adam(0.1)), ["changes the sign", "optax.scale_by_adam()"]),
    *(
        (lambda name=name: two_optimizers(name), [f"{name} changes the sign of w", "optax.scale("])
        for name in ("gradient_transform", "step_transform")
    ),
    (lambda: masked(optax.chain(optax.trace(0.9), optax.scale(-1.0))), ["changes the sign"]),
    (
        lambda: A.fedopt(loss, client_lr=0.1, server_optimizer=optax.scale_by_adam()),
        ["server_optimizer", "optax.adam(0.01)"],
    ),
    (lambda: run(algorithm=fedavg(step_transform=optax.lbfgs())), ["step_transform", "value_fn"]),
    (lambda: fedavg(client_lr=by_python), ["client_lr is by_python", "jnp.where"]),
    (lambda: fedavg(server_lr=lambda t: jnp.ones(2)), ["server_lr is", "one number"]),
    (lambda: fedavg(client_lr=lambda t: "a"), ["client_lr is", "no number"]),
    (lambda: fedavg(client_lr=lambda t: RATES[t]), ["client_lr is", "jnp.asarray(rates)[round]"]),
]
RESULTS = [
    (lambda: scored(lambda p, e: (e.y.mean(), e.y.mean())), ["count_fn returned", "(12,)"]),
    (lambda: scored(lambda p, e: (e.x, e.y)), ["shape (12, 3)", "(12,)"]),
    (lambda: scored(two_arguments, data.Examples(X[:0], Y[:0])), ["test has no examples"]),
    (
        lambda: build_evaluation(two_arguments, EXAMPLES, frozen=params()),
        ["count_fn takes (", "with frozen weights", "(params, examples, frozen)"],
    ),
    (
        lambda: scored(lambda p, e, weights: (e.y, e.y)),
        ["count_fn takes (p, e, weights)", "without frozen weights", "(params, examples)"],
    ),
    (lambda: own_models(counts=lambda p: p), ["count_fn takes (p)", "(params, examples)"]),
    (lambda: scored(called("test_loss")), ["count_fn.score is 'test_loss'", "other than"]),
    (lambda: scored(called("")), ["count_fn.score is ''", "name"]),
    (lambda: scored(called(called)), ["count_fn.score is <function called", "name"]),
    (lambda: scored(called("perplexity", True)), ["count_fn.score is 'perplexity'"]),
    (lambda: tuned(score=lambda p, e: e.y.mean()), ["score returned", "shape ()"]),
    (lambda: run(evaluate=lambda p: {0: 1.0}), ["evaluate returned the name 0", "strings"]),
    (lambda: run(evaluate=lambda p: {"diverged": 1.0}), ["evaluate returned 'diverged'"]),
    (lambda: drawn(lambda k, t: np.random.permutation(4)[:2]), ["sample_cohort", "the key"]),
    (lambda: with_client_metrics(fedavg(), **{"per_client/x": loss}), ["per_client/x"]),
    (lambda: swept(seeds=3), ["seeds is 3", "range(3)"]),
    (lambda: tuned(validation=(X, Y)), ["validation is tuple", "FederatedArrays"]),
    (lambda: tuned(seeds=3), ["seeds is 3", "range(3)"]),
    (lambda: table(x="who", categories={"who": {"a": 0}}), ["categories['who']", "sequence"]),
    (
        lambda: scored(models.accuracy_counts(lambda p, x, key: x), (X, Y)),
        ["examples is tuple", "x and y"],
    ),
]
EVALUATIONS = [
    (lambda: build_client_evaluation(None, clients()), ["count_fn is None", "accuracy_counts"]),
    (
        lambda: build_client_evaluation(two_arguments, (X, Y)),
        ["clients is tuple", "FederatedArrays"],
    ),
    (lambda: own_models(counts=3), ["count_fn is 3", "accuracy_counts"]),
    (lambda: own_models(counts=called("test_loss")), ["count_fn.score is 'test_loss'"]),
    (lambda: build_client_evaluation(called(3), clients()), ["count_fn.score is 3", "name"]),
    (lambda: own_models(model_of=fedavg()), ["model_of is fedavg", "client_models(algorithm)"]),
    (lambda: own_models(model_of=params()), ["model_of is {", "client_models(algorithm)"]),
    (lambda: own_models(tests={"a": (X, Y)}), ["clients is dict", "FederatedArrays"]),
    (lambda: own_models(state=params()), ["state is dict", "FedState", "result.state"]),
    (lambda: own_models(), ["count_fn returned dict", "(correct [B], losses [B])"]),
    (
        lambda: own_models(model_of=client_models(A.ditto(loss, **LOSS)), state=params()),
        ["state is dict", "FedState"],
    ),
    (lambda: client_models(A.fedavg), ["algorithm is fedavg", "client_lr"]),
    (lambda: client_models(fedavg(), EXAMPLES), ["train is Examples", "FederatedArrays"]),
    (lambda: personal_scores([0.1, 0.2, 0.3], [1, 2]), ["(3,)", "(2,)", "for each client"]),
]
CASES = EVALUATIONS + FACTORIES + SIMULATIONS + WRAPPERS + DATA + SIGNS_AND_SCHEDULES + RESULTS


def test_there_are_a_hundred():
    assert len(CASES) >= 100
    assert fedjax_lab.__all__


@pytest.mark.parametrize("number", range(len(CASES)))
def test_a_wrong_call(number):
    call, words = CASES[number]
    with pytest.raises((TypeError, ValueError, FileNotFoundError)) as caught:
        call()
    message = str(caught.value)
    assert [word for word in words if word not in message] == [], message
    assert not isinstance(caught.value, (jax.errors.JAXTypeError, KeyError))
