"""A model for each client: what personalisation adds to FedAvg, on each client's own mix of labels.

FedPer (Arivazhagan et al., 2019), FedRep (Collins et al., ICML 2021) and Ditto (Li et al.,
ICML 2021), next to FedAvg, to FedAvg whose model every client fine-tunes before it is scored, and
to clients that train alone.

    python -m experiments.catalogue personal
"""

import functools

import jax

from experiments.studies.personal import Personal
from experiments.studies.study import Column, Method, Scale, Study, smoke
from fedjax_lab import algorithms, with_personal
from fedjax_lab.algorithms import ditto
from fedjax_lab.wrappers import client_params, personal_first

_BATCH = 64  # of fine-tuning, as of training


def is_head(path: str) -> bool:
    """Whether a leaf belongs to the last layer."""
    return path.startswith("classifier")


def common_model(algorithm, setup, point):
    """Every client's model is the server's."""
    return lambda state, client: algorithm.params(state)


def own_leaves(algorithm, setup, point):
    """A client's model is the shared leaves with its own."""
    return functools.partial(client_params, algorithm)


def own_rows(algorithm, setup, point):
    """A client's model is its row."""
    return lambda state, client: jax.tree.map(lambda table: table[client], state.clients)


def fine_tuned(algorithm, setup, point):
    """The server's model after so many steps more on the client's own training images."""
    clients, loss_fn = setup.clients, setup.loss_fn
    lr, steps = point["client_lr"], int(point["steps"])

    def model_of(state, client):
        def step(params, key):
            places = jax.random.randint(key, (_BATCH,), 0, clients.sizes[client])
            rows = clients.indices[clients.starts[client] + places]
            batch = jax.tree.map(lambda leaf: leaf[rows], clients.examples)
            gradient = jax.grad(lambda p: loss_fn(p, batch, key).mean())(params)
            return jax.tree.map(lambda p, g: p - lr * g, params, gradient), None

        keys = jax.random.split(jax.random.fold_in(jax.random.key(0), client), steps)
        return jax.lax.scan(step, algorithm.params(state), keys)[0]

    return model_of


def fedavg(loss_fn, *, client_lr, steps=None):
    """FedAvg; the steps of fine-tuning are not its business."""
    return algorithms.fedavg(loss_fn, client_lr=client_lr)


def fedper(loss_fn, *, client_lr):
    """FedAvg with a head of each client's own."""
    return with_personal(algorithms.fedavg(loss_fn, client_lr=client_lr), is_head)


def fedrep(loss_fn, *, client_lr, head_steps):
    """FedPer, whose local steps move the head first and then the rest."""
    transform = personal_first(is_head, int(head_steps))
    fedavg = algorithms.fedavg(loss_fn, client_lr=client_lr, step_transform=transform)
    return with_personal(fedavg, is_head)


def alone(loss_fn, *, client_lr):
    """Each client trains by itself, whenever it is drawn."""
    return ditto(loss_fn, client_lr=client_lr, prox_weight=0.0)


_CLIENT = {"client_lr": (0.1, 0.03, 0.3)}


def _method(build, model_of, then=None):
    name = f"{build.__name__}, {model_of.__name__}"
    return Method("fedavg", _CLIENT, then or {}, personal=Personal(name, build, model_of))


METHODS = {
    "FedAvg": _method(fedavg, common_model),
    "FedAvg, fine-tuned": _method(fedavg, fine_tuned, {"steps": (5, 20)}),
    "FedPer": _method(fedper, own_leaves),
    "FedRep": _method(fedrep, own_leaves, {"head_steps": (2, 4)}),
    "Ditto": _method(ditto, own_rows, {"prox_weight": (0.1, 1.0)}),
    "alone": _method(alone, own_rows),
}
_SETTING = {
    "dataset": "fashion_mnist",
    "model": "mlp",
    "partition": "dirichlet:0.1",
    "num_clients": 100,
    "cohort_size": 10,
    "batch_size": 64,
    "local_steps": 5,
    "rounds": 100,
    "eval_every": 10,
}

STUDY = Study(
    name="catalogue/personal",
    title="A model for each client",
    notes="""\
Fashion-MNIST at Dirichlet 0.1: 100 clients, 10 a round, 5 steps of batch 64, the MLP
784-200-100-10, 100 rounds. The 10,000 test images (in tuning, 5,000 held-out training images) are
divided among the clients so that each gets its own mix of labels (`data.divide_like`), and **each
client's model is scored on its own test images**: accuracy is the mean over the clients, each
counting once, and the worst 10 % are the ten clients with the lowest accuracy of the last models on
these test images, not on training data. A client without a test image is left out (one in seed 12).
Half of the clients have fewer than about 70 test images, and one in twenty fewer than 5, so the
worst tenth is coarse.

FedAvg serves all clients the same model. "Fine-tuned" is FedAvg whose model every client trains
for some steps of batch 64 on its own training images each time before it is scored, which is not in
the gradients that are counted. FedPer and FedRep keep the last layer with the client; FedRep's five
local steps first move this layer, then the others. Ditto trains the client's own model beside the
common one, so that its round takes twice the gradients, which the count shows. "Alone" is Ditto
without the pull towards the common model: what a client is drawn for, and nothing from the others;
its traffic and half of its gradients are Ditto's, and of no use to it.""",
    methods=METHODS,
    scales={
        "machine": Scale(columns={"dirichlet:0.1": Column(_SETTING, 30)}, minutes=15),
        "smoke": smoke(20, 4, ("FedAvg, fine-tuned", "FedRep", "Ditto")),
    },
)
