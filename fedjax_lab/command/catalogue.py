"""The catalogue of methods: names, papers and costs, computed from the code.

Axes: N clients. Sizes are in units of d, the size of the params in their own dtype.
"""

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_lab import models, tree
from fedjax_lab.algorithms import ALGORITHMS, PUBLISHED, Published
from fedjax_lab.command.options import REQUIRED, algorithm_options, describe_options
from fedjax_lab.machine.keys import seeded
from fedjax_lab.markdown import Cells

# factory -> (the method's name, its paper), in reading order.
SOURCES: dict[str, tuple[str, str]] = {
    "fedavg": ("FedAvg", "McMahan et al., AISTATS 2017"),
    "fedprox": ("FedProx", "Li et al., MLSys 2020"),
    "fednova": ("FedNova", "Wang et al., NeurIPS 2020"),
    "fedexp": ("FedExP", "Jhunjhunwala et al., ICLR 2023"),
    "fedavgm": ("FedAvgM, server momentum", "Hsu et al., 2019"),
    "fedproxm": ("FedProx with server momentum", "Luo et al., CVPR 2023"),
    "fedopt": ("FedOpt, any optax server optimizer", "Reddi et al., ICLR 2021"),
    "fedadagrad": ("FedAdagrad", "Reddi et al., ICLR 2021"),
    "fedadam": ("FedAdam", "Reddi et al., ICLR 2021"),
    "fedyogi": ("FedYogi", "Reddi et al., ICLR 2021"),
    "fedams": ("FedAMS", "Wang et al., ICML 2022"),
    "scaffold": ("SCAFFOLD, options I and II", "Karimireddy et al., ICML 2020"),
    "feddyn": ("FedDyn", "Acar et al., ICLR 2021"),
    "fedadmm": ("FedADMM, both methods of that name", "Wang, CDC 2022; Gong, ICDE 2022"),
    "fedpd": ("FedPD", "Zhang et al., IEEE TSP 2021"),
    "mifa": ("MIFA", "Gu et al., NeurIPS 2021"),
    "mifam": ("MIFA with server momentum", "Luo et al., CVPR 2023"),
    "moon": ("MOON", "Li et al., CVPR 2021"),
    "moonm": ("MOON with server momentum", "Luo et al., CVPR 2023"),
    "fedmlb": ("FedMLB", "Kim et al., ICML 2022"),
    "fedmlbm": ("FedMLB with server momentum", "Luo et al., CVPR 2023"),
    "fedcm": ("FedCM", "Xu et al., 2021"),
    "mimelite": ("MimeLite, momentum SGD", "Karimireddy et al., NeurIPS 2021"),
    "mime": ("Mime, momentum SGD", "Karimireddy et al., NeurIPS 2021"),
    "fedacg": ("FedACG", "Kim et al., CVPR 2024"),
    "stem": ("STEM", "Khanduri et al., NeurIPS 2021"),
    "naive_adaptive_fedavg": ("naive adaptive FedAvg, of FAFED", "Wu et al., AAAI 2023"),
    "fafed": ("FAFED", "Wu et al., AAAI 2023"),
    "fedsam": ("FedSAM", "Qu et al., ICML 2022; Caldarola et al., ECCV 2022"),
    "fedasam": ("FedASAM", "Caldarola et al., ECCV 2022"),
    "mofedsam": ("MoFedSAM", "Qu et al., ICML 2022"),
    "fedgamma": ("FedGAMMA", "Dai et al., IEEE TNNLS 2023"),
    "fedlesam": ("FedLESAM, -S, -D", "Fan et al., ICML 2024"),
    "fedsmoo": ("FedSMOO", "Sun et al., ICML 2023"),
    "fedspeed": ("FedSpeed", "Sun et al., ICLR 2023"),
    "fedspeed_ing": ("FedSpeed-Ing", "Sun, thesis 2023"),
    "fedswa": ("FedSWA", "Liu et al., ICML 2025"),
    "fedmo": ("FedMo, ablation of FedMoSWA", "Liu et al., ICML 2025"),
    "fedmoswa": ("FedMoSWA", "Liu et al., ICML 2025"),
    "cfedavg": ("CFedAvg, any compressor", "Yang et al., MobiHoc 2021"),
    "gradma_w": ("GradMA-W, its worker half", "Luo et al., CVPR 2023"),
    "gradma_s": ("GradMA-S, its server half", "Luo et al., CVPR 2023"),
    "gradma": ("GradMA", "Luo et al., CVPR 2023"),
    "local_only": ("local training only, a model for each client", "the usual lower bound"),
    "fedper": ("FedPer, a model for each client", "Arivazhagan et al., 2019"),
    "lg_fedavg": ("LG-FedAvg, a model for each client", "Liang et al., 2020"),
    "fedbn": ("FedBN, a model for each client", "Li et al., ICLR 2021"),
    "fedrep": ("FedRep, a model for each client", "Collins et al., ICML 2021"),
    "fedbabu": ("FedBABU, a model for each client", "Oh et al., ICLR 2022"),
    "ditto": ("Ditto, a model for each client", "Li et al., ICML 2021"),
    "pfedme": ("pFedMe, a model for each client", "T. Dinh et al., NeurIPS 2020"),
    "apfl": ("APFL, a model for each client", "Deng et al., 2020"),
}  # fmt: skip

# Sizes (up, down, client state) of methods with personal leaves: u for the shared leaves, h for the
# personal ones, d = u + h.
_IN_PARTS = {
    **dict.fromkeys(("fedper", "lg_fedavg", "fedbn", "fedrep"), ("u", "u", "h")),
    "fedbabu": ("u", "d", "0"),
}

# Values of arguments without a default; the costs do not depend on them.
_EXAMPLES: dict[str, Any] = {
    "compressor": "identity",
    "memory_size": 2,
    "server_optimizer": optax.sgd(1.0),
}
_NUM_CLIENTS = 2


class Entry(NamedTuple):
    """A row of the catalogue.

    Attributes:
      method: name of the method in the literature.
      paper: authors, venue and year.
      traffic: sizes of a client's messages in a round, of the broadcast to it, and of its row of
        state, such as "2d"; of methods with personal leaves in u (shared leaves) and h (the others)
        instead of d.
      gradients: number of mini-batch gradients in a local step.
      options: hyperparameters and their defaults, without learning rates.
    """

    method: str
    paper: str
    traffic: tuple[str, str, str]
    gradients: int
    options: Mapping[str, Any]


def entry(name: str) -> Entry:
    """Compute the catalogue's row of one method, with its default options.

    CFedAvg's row is that of the identity compressor.

    Raises:
      KeyError: no method has this name.
    """
    factory = ALGORITHMS[name]
    parameters = inspect.signature(factory).parameters
    model = models.mlp(10, hidden=(8, 8), norm="group" if name == "fedbn" else None)
    params = jax.eval_shape(model.init, seeded(0), jnp.zeros((1, 784)))
    arguments = {
        argument: _EXAMPLES.get(argument, 0.5)
        for argument, parameter in parameters.items()
        if parameter.default is REQUIRED and argument not in ("loss_fn", "model")
    }
    loss_fn = models.classification_loss(model.apply)
    algorithm = factory(model if "model" in parameters else loss_fn, **arguments)
    d = tree.nbytes(params)
    _, clients = jax.eval_shape(lambda params: algorithm.start(params, _NUM_CLIENTS, None), params)
    method, paper = SOURCES[name]
    return Entry(
        method,
        paper,
        traffic=_IN_PARTS.get(name)
        or (
            _size(algorithm.uplink(params) / d),
            _size(algorithm.downlink(params) / d),
            _size(tree.nbytes(clients) / _NUM_CLIENTS / d),
        ),
        gradients=algorithm.gradients_per_step,
        options=algorithm_options(name),
    )


def _size(value: float) -> str:
    """Format a size as text: 0, d, 2d."""
    number = f"{round(value, 1):g}"  # a tenth of d hides single numbers such as a counter
    return {"0": "0", "1": "d"}.get(number, f"{number}d")


def table() -> str:
    """Format the catalogue as a Markdown table."""
    head = ["factory", "method", "paper", "up", "down", "client state", "gradients a step"]
    head += ["options and defaults"]
    rows = []
    for name in SOURCES:
        row = entry(name)
        sizes = ("compressed", *row.traffic[1:]) if name == "cfedavg" else row.traffic
        described = describe_options(row.options)
        cells = [f"`{name}`", row.method, row.paper, *sizes, str(row.gradients)]
        rows.append([*cells, f"`{described}`" if described else ""])
    return _markdown([head, *rows])


def _markdown(rows: Cells) -> str:
    """Format a table whose columns are not padded, so that a change of one row is one line."""
    head, *body = rows
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def page() -> str:
    """Write the documentation page of the catalogue, docs/algorithms.md."""
    return f"""# The methods

`python -m fedjax_lab algorithms --markdown` generates this page from the code. The columns are

- **up, down**: the size of what a client sends and receives in a round;
- **client state**: the size of the state that each client keeps from round to round;
- **gradients a step**: the number of mini-batch gradients in a local step.

Sizes are in units of d, the size of the model's parameters. For methods with personal leaves, u is
the size of the shared leaves and h the size of the personal ones: d = u + h. The numbers hold for
the default options; the docstrings say which options change them.

Every method takes a client learning rate (`client_lr`), a `gradient_transform` (of each mini-batch
gradient) and a `step_transform` (of the whole direction of a local step). Most take a `server_lr`.

Methods with a model for each client are evaluated on the clients' own test examples:
[a model for each client](guides/a_model_for_each_client.md).

{table()}

## As published

Some authors' code differs from the paper. `algorithms.as_published(name, loss_fn, client_lr=...)`,
or `--as-published` on the command line, runs these methods as the code does.
[Papers and their codes](papers_and_codes.md) lists the differences. The last column names settings
of the run, such as schedules; you have to set them yourself.

{published_table()}
"""


def published_table() -> str:
    """Format the settings of published codes as a Markdown table."""
    head = ["factory", "code", "options", "clipping and weight decay", "settings of the run"]
    rows = []
    for name, found in PUBLISHED.items():
        options = describe_options(found.options)
        shown = f"`{options}`" if options else ""
        rows.append([f"`{name}`", found.code, shown, clipping(found), found.also])
    return _markdown([head, *rows])


def clipping(found: Published) -> str:
    """Describe where a published code clips and decays."""
    if found.clip_norm is None and not found.weight_decay:
        return "none"
    on = {"gradient": "gradient", "step": "step", "prox step": "step without prox_weight * y"}
    return f"{on[found.clips]} to norm {found.clip_norm:g}, then {found.weight_decay:g}"
