"""The methods of the leaderboard and the spaces in which they are tuned.

Rates and other numbers without an upper limit have ranges, which a search extends if its best point
lies at an end. Numbers below 1, such as a momentum, have lists, which it does not extend; they hold
the value at which the method is a simpler one, where that is such a number.

Many methods contain, or come near to, a simpler one that has a row, too. A search whose best point
scores below that row's on validation is repeated from there.
"""

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.leaderboard.tasks import CONVEX, PLAY_ROLES, ROLES, Problem, Task
from fedjax_lab import with_compression
from fedjax_lab.command.factories import find
from fedjax_lab.round import Algorithm

Axis = tuple[float, float] | Sequence[float]

# A method is tuned over those of these that it takes, unless it has a space of its own.
SPACE: Mapping[str, Axis] = {
    "client_lr": (0.01, 1.0),
    "server_lr": (0.3, 3.0),
    "prox_weight": (1e-3, 1.0),
    "perturbation_radius": (0.01, 0.5),
    "momentum": [0.0, 0.5, 0.8, 0.9, 0.95],
    "mixing": [0.05, 0.1, 0.2, 0.5, 1.0],
}
_ADAPTIVE = {"client_lr": (0.01, 1.0), "server_lr": (0.003, 0.3), "tau": [1e-4, 1e-3, 1e-2]}
_EMA = [0.05, 0.1, 0.2, 0.5, 1.0]
_DECAY = [0.1, 0.5, 0.9]
_MIME = {"momentum": [0.0, *_DECAY]}
_INERTIA = {"inertia": [0.0, 0.1, 0.3, 0.6]}
_RATIO = [0.1, 0.3, 0.6, 1.0]


@dataclasses.dataclass(frozen=True)
class Method:
    """A row of the leaderboard.

    Attributes:
      factory: a method's name, or ``package.module:factory`` of one's own.
      space: hyperparameter -> (low, high) or a list; in place of what ``SPACE`` says, or None for
        one that is not tuned.
      fixed: the other arguments.
      adapts_steps: whether a client's steps do not grow with its gradients, so that a task does not
        move the range of its learning rate.
      simpler: rows above this one -> the values at which this method is theirs, or nearest to it.
    """

    factory: str
    space: Mapping[str, Axis | None] = dataclasses.field(default_factory=dict)
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    adapts_steps: bool = False
    simpler: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)

    def axes(self, task: Task | None = None) -> dict[str, Axis]:
        """Return hyperparameter -> range or list.

        Args:
          task: may move the range of the client learning rate.
        """
        shared = {name: axis for name, axis in SPACE.items() if name in self.takes}
        merged = {**shared, **self.space}
        axes = {n: axis for n, axis in merged.items() if axis is not None and n not in self.fixed}
        if task is not None and task.rate_factor != 1.0 and not self.adapts_steps:
            low, high = axes["client_lr"]
            axes["client_lr"] = (low * task.rate_factor, high * task.rate_factor)
        return axes

    def fixed_for(self, num_clients: int) -> dict[str, Any]:
        """Return the arguments that are not tuned; a memory has a slot for each client.

        Args:
          num_clients: number of clients.
        """
        slots = {"memory_size": num_clients} if "memory_size" in self.takes else {}
        return {**slots, **self.fixed}

    def build(self, task: Task, problem: Problem, **point: Any) -> Algorithm:
        """Build the method at a point.

        Args:
          task, problem: the task and its data.
          **point: hyperparameters, which may be traced.
        """
        factory = find("algorithm", self.factory)
        more = self.fixed_for(task.num_clients)
        subject: Any = problem.loss_fn
        if self.looks_inside:
            subject, more["preprocess"] = problem.model, problem.preprocess
        if task.decay != 1.0:
            rate = point["client_lr"]
            more["client_lr"] = lambda round: rate * task.decay ** (round / task.rounds)
            point = {name: value for name, value in point.items() if name != "client_lr"}
        algorithm = factory(subject, **more, **point)
        if task.compressor is None or "compressor" in self.fixed:  # it compresses by itself
            return algorithm
        return with_compression(algorithm, task.compressor)

    @property
    def takes(self) -> Mapping[str, inspect.Parameter]:
        """The parameters of the factory."""
        return inspect.signature(find("algorithm", self.factory)).parameters

    @property
    def looks_inside(self) -> bool:
        """Whether the method takes a model, not a loss."""
        return "model" in self.takes

    def refused(self, task: Task) -> str | None:
        """Return why a task does not have this row; None: it has.

        Args:
          task: the task.
        """
        if self.looks_inside and task.dataset in (CONVEX, ROLES, PLAY_ROLES):
            return "needs a model of images with layers"
        return None


_GRADMA = {"server_momentum": [0.5, 0.9], "memory_decay": _DECAY}
_LEAST_PROX, _LEAST_RADIUS = {"prox_weight": 1e-3}, {"perturbation_radius": 0.01}
_NO_MOMENTUM, _LEAST_CONTRAST = {"momentum": 0.0}, {"contrastive_weight": 0.1}

# The most used first: they run first.
METHODS: dict[str, Method] = {
    "fedavg": Method("fedavg"),
    "fedprox": Method("fedprox", simpler={"fedavg": _LEAST_PROX}),
    "scaffold": Method("scaffold"),
    "fedavgm": Method("fedavgm", simpler={"fedavg": _NO_MOMENTUM}),
    "fedadam": Method("fedadam", _ADAPTIVE),
    "fedyogi": Method("fedyogi", _ADAPTIVE),
    "feddyn": Method("feddyn"),
    "fednova": Method("fednova", {"prox_weight": None}),
    "fedexp": Method("fedexp"),
    "fedcm": Method("fedcm", simpler={"fedavg": {"mixing": 1.0}}),
    "fedacg": Method(
        "fedacg", simpler={"fedavg": {**_LEAST_PROX, **_NO_MOMENTUM}, "fedprox": _NO_MOMENTUM}
    ),
    "fedsam": Method("fedsam", simpler={"fedavg": _LEAST_RADIUS}),
    "fedspeed": Method("fedspeed"),
    "fedspeed all": Method("fedspeed", {}, {"server_dual": "all"}),
    "fedswa": Method(
        "fedswa", {"final_lr_ratio": _RATIO}, simpler={"fedavg": {"final_lr_ratio": 1.0}}
    ),
    "fedmo": Method("fedmo", {"momentum": _EMA}),
    "fedmoswa": Method(
        "fedmoswa",
        {"final_lr_ratio": _RATIO, "momentum": _EMA},
        simpler={"fedmo": {"final_lr_ratio": 1.0, "server_lr": 1.0}},
    ),
    "gradma_s": Method("gradma_s", _GRADMA),
    "gradma": Method("gradma", _GRADMA),
    "moon": Method("moon", {"contrastive_weight": (0.1, 5.0)}, simpler={"fedavg": _LEAST_CONTRAST}),
    "mime": Method("mime", _MIME),
    "mimelite": Method("mimelite", _MIME, simpler={"fedavg": _NO_MOMENTUM}),
    "cfedavg": Method("cfedavg", {}, {"compressor": "top_k:0.9"}),
    "mifa": Method("mifa"),
    "fafed": Method(
        "fafed",
        {"client_lr": (1e-3, 0.1), "momentum": _EMA, "second_moment_decay": _DECAY},
        adapts_steps=True,
    ),
    "gradma_w": Method("gradma_w"),
    "fedspeed_ing": Method("fedspeed_ing", _INERTIA, simpler={"fedspeed": {"inertia": 0.0}}),
    "fedspeed_ing all": Method(
        "fedspeed_ing", _INERTIA, {"server_dual": "all"}, simpler={"fedspeed all": {"inertia": 0.0}}
    ),
    "fedadagrad": Method("fedadagrad", _ADAPTIVE),
    "fedams": Method("fedams", {**_ADAPTIVE, "tau": [1e-6, 1e-4, 1e-3]}),
    "stem": Method("stem", {"momentum": _EMA}, simpler={"fedavg": {"momentum": 1.0}}),
    "naive_adaptive_fedavg": Method(
        "naive_adaptive_fedavg",
        {"client_lr": (1e-3, 0.1), "second_moment_decay": [0.9, 0.99]},
        {"initial_second_moment": 0.01},
        adapts_steps=True,
    ),
    "fedadmm W": Method("fedadmm", {}, {"variant": "W"}),
    "fedadmm G": Method("fedadmm", {}, {"variant": "G"}),
    "fedpd": Method("fedpd", {"prox_weight": (0.01, 10.0)}),
    "fedproxm": Method("fedproxm", simpler={"fedprox": _NO_MOMENTUM, "fedavgm": _LEAST_PROX}),
    "mifam": Method("mifam", simpler={"mifa": _NO_MOMENTUM}),
    "moonm": Method(
        "moonm",
        {"contrastive_weight": (0.1, 5.0)},
        simpler={"moon": _NO_MOMENTUM, "fedavgm": _LEAST_CONTRAST},
    ),
    "fedmlb": Method("fedmlb"),
    "fedmlbm": Method("fedmlbm", simpler={"fedmlb": _NO_MOMENTUM}),
    "fedasam": Method(
        "fedasam",
        {"perturbation_radius": (0.05, 1.0)},
        simpler={"fedavg": {"perturbation_radius": 0.05}},
    ),
    "mofedsam": Method("mofedsam", simpler={"fedcm": _LEAST_RADIUS, "fedsam": {"mixing": 1.0}}),
    "fedgamma": Method("fedgamma", simpler={"scaffold": _LEAST_RADIUS}),
    "fedlesam": Method("fedlesam", {"prox_weight": None}, simpler={"fedavg": _LEAST_RADIUS}),
    "fedlesam-S": Method(
        "fedlesam", {"prox_weight": None}, {"variant": "S"}, simpler={"scaffold": _LEAST_RADIUS}
    ),
    "fedlesam-D": Method(
        "fedlesam", {}, {"variant": "D"}, simpler={"feddyn": {**_LEAST_RADIUS, "server_lr": 1.0}}
    ),
    "fedsmoo": Method("fedsmoo", simpler={"feddyn": _LEAST_RADIUS}),
}
# Methods of the catalogue that are no rows, and why.
LEFT_OUT: Mapping[str, str] = {
    "fedopt": "any optimizer of optax; `fedavgm`, `fedadam`, `fedyogi` and others are examples",
    **dict.fromkeys(
        (
            *("apfl", "ditto", "fedbabu", "fedbn", "fedper", "fedrep"),
            *("lg_fedavg", "local_only", "pfedme"),
        ),
        "each client has a model of its own, which a common test set cannot score",
    ),
}
