"""The tasks of the leaderboard: data, model, schedule, and the target that a run is to reach.

Images are those of Fashion-MNIST at half their resolution, 14 x 14. On them the score is the
accuracy in percent on 4,000 test images; tuning scores on 2,000 images that no client has.
Speaking roles of Shakespeare's plays predict the next character: the score is the accuracy in
percent on the last fifths of their texts; tuning scores on other roles. On the convex problem the
score is the number of decimal digits by which a run has come closer to the optimum than its first
model.
"""

import dataclasses
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.natural.runs import pooled
from fedjax_lab import data, models
from fedjax_lab.data import shakespeare, synthetic
from fedjax_lab.data.cohort import ScheduleOptions
from fedjax_lab.models import Model
from fedjax_lab.recipes.shakespeare_roles import PLAY
from fedjax_lab.simulation.evaluate import build_evaluation
from fedjax_lab.types import Key, Params, PyTree

CONVEX, ROLES, PLAY_ROLES = "convex", "shakespeare", "small plays"
TEXTS = Path("runs/shakespeare")
ORDER_SEED, PARTITION_SEED = 0, 0
SEEDS = tuple(range(11, 21))


@dataclasses.dataclass(frozen=True)
class Task:
    """The conditions under which methods are compared.

    Attributes:
      title: heading of its table.
      asks: what it tells apart, a sentence.
      rounds: rounds of a run; with ``compressor``, of a method that sends one message a round.
      target: the score that a run is to reach.
      schedule: client sampling and mini-batches; ``devices`` is a dict of ``data.Devices``.
      num_clients: number of clients.
      dataset: data set, ``ROLES``, ``PLAY_ROLES`` or ``CONVEX``.
      partition: scheme that divides the images.
      images: number of training images of all clients together.
      hidden: widths of the hidden layers; of roles, units of the LSTM layer.
      compressor: what all methods send through; None: uncompressed messages.
      rate_factor: by which the ranges of client learning rates are moved.
      decay: by which the client's learning rate falls over all rounds, exponentially.
      seeds: of the final runs.
      one_draw: whether all seeds share the clients; else each seed divides the images, or draws the
        convex problem, anew.
    """

    title: str
    asks: str
    rounds: int
    target: float
    schedule: Mapping[str, Any]
    num_clients: int = 50
    dataset: str = "fashion_mnist"
    partition: str = "iid"
    images: int = 4_000
    hidden: tuple[int, ...] = (32,)
    compressor: str | None = None
    rate_factor: float = 1.0
    decay: float = 1.0
    seeds: tuple[int, ...] = SEEDS
    one_draw: bool = False

    @property
    def unit(self) -> str:
        """Unit of the score."""
        return "digits" if self.dataset == CONVEX else "%"

    def conditions(self) -> dict[str, Any]:
        """Return what decides the numbers of a run."""
        found = dataclasses.asdict(self)
        usual = {"rate_factor": 1.0, "decay": 1.0, "one_draw": False}
        said = {n: found[n] for n in found if n not in ("title", "asks", "target")}
        return {n: value for n, value in said.items() if n not in usual or usual[n] != value}

    def options(self) -> ScheduleOptions:
        """Return the keyword arguments of ``sweep`` and ``tune``."""
        found: Any = dict(self.schedule)
        if "devices" in found:
            found["devices"] = data.Devices(**found["devices"])
        return found


_STEPS = {"cohort_size": 10, "local_steps": 5, "batch_size": 20}
_FEW: Any = {
    "target": 73.0,
    "schedule": {"cohort_size": 10, "local_steps": 20, "batch_size": 5},
    "partition": "dirichlet_equal:0.3",
    "images": 500,
    "hidden": (64,),
}
TASKS = {
    "skew-0.1": Task(
        title="Label skew, Dirichlet 0.1",
        asks="Clients hold few classes each.",
        rounds=90,
        target=75.0,
        schedule=_STEPS,
        partition="dirichlet_equal:0.1",
    ),
    "skew-0.01": Task(
        title="Label skew, Dirichlet 0.01",
        asks="Nearly every client holds a single class.",
        rounds=90,
        target=70.0,
        schedule=_STEPS,
        partition="dirichlet_equal:0.01",
    ),
    "few-data": Task(
        title="Few data",
        asks="10 images a client: training accuracy is far above test accuracy.",
        rounds=90,
        **_FEW,
    ),
    "few-data-decay": Task(
        title="Few data, falling learning rate",
        asks="As few data; the learning rate falls to 0.135 of the first, as it does over the "
        "1,000 rounds of FedSWA's paper.",
        rounds=90,
        **_FEW,
        decay=0.135,
    ),
    "unequal": Task(
        title="Unequal sizes and unequal work",
        asks="5 of 100 clients a round; a client takes 1 to 10 local steps, drawn anew each round.",
        rounds=90,
        target=73.0,
        schedule={
            **{"cohort_size": 5, "local_steps": 10, "batch_size": 20, "weights": "examples"},
            "devices": {"min_local_steps": 1},
        },
        num_clients=100,
        partition="dirichlet:0.3",
    ),
    "natural": Task(
        title="Natural clients, speaking roles",
        asks="Speaking roles of Shakespeare's plays, of very unequal sizes, predict the next "
        "character: 10 of 100 roles and one pass over their texts in a round.",
        rounds=60,
        target=33.0,
        schedule={"cohort_size": 10, "local_epochs": 1, "batch_size": 10, "weights": "examples"},
        num_clients=100,
        dataset=ROLES,
        partition="roles",
        images=0,
        hidden=(32,),
        rate_factor=10.0,
        seeds=SEEDS[:5],
        one_draw=True,
    ),
    "convex": Task(
        title="Convex",
        asks="Quadratics with different optima and curvatures, and noisy gradients.",
        rounds=90,
        target=1.0,
        schedule={"cohort_size": 10, "local_steps": 10, "batch_size": 5},
        dataset=CONVEX,
    ),
    "compressed": Task(
        title="Compressed uplink, equal bytes",
        asks="Each message keeps a tenth of its numbers, with error feedback. A method that sends "
        "twice as much runs half the rounds.",
        rounds=90,
        target=70.0,
        schedule=_STEPS,
        partition="dirichlet_equal:0.1",
        compressor="top_k:0.9",
    ),
}


def smoke(task: Task) -> Task:
    """Return a task at its smallest, on digits.

    Args:
      task: the task.
    """
    schedule = {**task.schedule, "cohort_size": 3, "local_steps": 2, "batch_size": 4}
    small = dataclasses.replace(task, rounds=9, schedule=schedule, num_clients=6, seeds=SEEDS[:2])
    if task.dataset == CONVEX:
        return small
    if task.dataset == ROLES:
        own = {"cohort_size": 2, "local_epochs": 1, "batch_size": 4}
        return dataclasses.replace(
            small, dataset=PLAY_ROLES, schedule=own, num_clients=2, hidden=(8,)
        )
    return dataclasses.replace(small, dataset="digits", images=120, hidden=(8,))


class Problem(NamedTuple):
    """The data and functions of a task.

    Attributes:
      clients: the federation.
      validation: what tuning scores on; one client.
      params: key -> first model.
      loss_fn: loss of the methods.
      model, preprocess: of methods that look inside the model; None in the convex task.
      score: (params, validation examples [B, ...]) -> [B], larger is better.
      evaluate: params -> {"score"} on the test set; with images also {"train"}.
      redrawn: seed -> the problem with other clients; its functions but ``evaluate`` are the same.
    """

    clients: data.FederatedArrays
    validation: data.FederatedArrays
    params: Callable[[Key], Params]
    loss_fn: Callable[..., jax.Array]
    model: Model | None
    preprocess: Callable[..., Any] | None
    score: Callable[[Params, PyTree], jax.Array]
    evaluate: Callable[[Params], dict[str, jax.Array]]
    redrawn: "Callable[[int], Problem]"


def problem(task: Task) -> Problem:
    """Load the data of a task and build its functions.

    Args:
      task: the task.
    """
    if task.dataset in (ROLES, PLAY_ROLES):
        return _roles(task)
    return _convex(task, PARTITION_SEED) if task.dataset == CONVEX else _images(task)


def _images(task: Task) -> Problem:
    train, test = map(_halved, data.load(task.dataset))
    order = np.random.default_rng(ORDER_SEED).permutation(len(train.y))
    own, rest = _take(train, order[: task.images]), order[task.images :]
    held = _take(train, rest[:2_000])
    mean, std, scale = data.normalization(own)
    preprocess = data.preprocess(mean, std, scale=scale)
    classes = int(train.y.max()) + 1
    model = models.build("mlp", num_classes=classes, hidden=list(task.hidden))
    counts = models.accuracy_counts(model.apply, preprocess)
    on_test = build_evaluation(counts, _take(test, np.arange(min(4_000, len(test.y)))))
    on_train = build_evaluation(counts, _take(own, np.arange(min(1_000, task.images))))

    def evaluate(params):
        return {
            "score": 100 * on_test(params)["accuracy"],
            "train": 100 * on_train(params)["accuracy"],
        }

    def clients(seed):
        return data.partition(own, task.partition, num_clients=task.num_clients, seed=seed)

    found = Problem(
        clients(PARTITION_SEED),
        data.partition(held, "iid", num_clients=1, seed=0),
        lambda key: model.init(key, jnp.asarray(own.x[:1])),
        models.classification_loss(model.apply, preprocess),
        model,
        preprocess,
        lambda params, examples: 100 * counts(params, examples)[0],
        evaluate,
        lambda seed: found._replace(clients=clients(seed)),
    )
    return found


def _roles(task: Task) -> Problem:
    if task.dataset == ROLES:
        parts = data.load_federated("shakespeare", shakespeare.fetch(TEXTS))
    else:
        with tempfile.TemporaryDirectory() as folder:
            for name in ("the well", "another well"):
                play = PLAY.replace("THE WELL", name.upper())
                Path(folder, f"{name}.txt").write_text(play, encoding="utf-8")
            parts = data.load_federated("shakespeare", folder)
    (others, clients), (_, own_tests) = (
        data.split_clients(part, task.num_clients, seed=PARTITION_SEED) for part in parts
    )
    test, held = (pooled(part, 500) for part in (own_tests, others))
    sizes = {"embedding": 8, "hidden": task.hidden[0], "layers": 1, "dropout": 0.0}
    model = models.lstm(shakespeare.NUM_TOKENS, **sizes)

    def counts(examples):
        return models.answer_counts(model.apply, data.scored_per_row(examples))

    on_test, on_held = build_evaluation(counts(test), test), counts(held)
    found = Problem(
        clients,
        data.partition(held, "iid", num_clients=1, seed=0),
        lambda key: model.init(key, jnp.asarray(test.x[:1])),
        models.answer_loss(model.apply),
        None,
        None,
        lambda params, examples: 100 * on_held(params, examples)[0],
        lambda params: {"score": 100 * on_test(params)["accuracy"]},
        lambda seed: found,  # the roles are the clients
    )
    return found


def _halved(examples: data.Examples) -> data.Examples:
    """Return images at half their resolution: means of 2 x 2 pixels."""
    n, height, width = examples.x.shape[:3]
    blocks = examples.x.reshape(n, height // 2, 2, width // 2, 2, -1)
    return data.Examples(blocks.mean((2, 4)).round().astype(examples.x.dtype), examples.y)


def _take(examples: data.Examples, chosen: np.ndarray) -> data.Examples:
    return data.Examples(examples.x[chosen], examples.y[chosen])


def _convex(task: Task, seed: int) -> Problem:
    dim, scale = 30, 0.1  # curvatures from 0.1 to 2, so that rates are like those of images
    found = synthetic.quadratics(
        task.num_clients, dim, condition=20.0, noise=0.5, examples_per_client=20, seed=seed
    )
    optimum = jnp.asarray(found.optimum, jnp.float32)

    def digits(params):
        distance = jnp.linalg.norm(params - optimum) / jnp.linalg.norm(optimum)
        return -jnp.log10(jnp.maximum(distance, jnp.finfo(jnp.float32).tiny))

    clients = data.partition(found.examples, found.client_ids, num_clients=task.num_clients)
    some = _take(found.examples, np.arange(2))
    return Problem(
        clients,
        data.partition(some, "iid", num_clients=1, seed=0),
        lambda key: jnp.zeros(dim),
        lambda params, examples, key: scale * found.loss_fn(params, examples, key),
        None,
        None,
        lambda params, examples: jnp.broadcast_to(digits(params), examples.y.shape),
        lambda params: {"score": digits(params)},
        lambda seed: _convex(task, seed),
    )
