"""Is a model for each client better than one for all, and than none together? On digits.

Each of 100 clients has two classes, and about 14 images. Models are evaluated on the clients' own
part of the test set. Results are means over five seeds with 95 % intervals. Each seed has its own
partition, initial model and cohorts, which are the same for all methods.

    python -m fedjax_lab.recipes.personal_methods           (a minute: four methods, two seeds)
    python -m fedjax_lab.recipes.personal_methods all       (ten methods, five seeds, 100 rounds)
    python -m fedjax_lab.recipes.personal_methods all 5     (five classes a client)

Results: accuracy in percent and, in brackets, its difference from that of FedAvg, fine-tuned, at
the same seeds. Learning rates and weights are not tuned:

===================  ============  =============  ============  =============
method               two classes                  five classes
===================  ============  =============  ============  =============
FedAvg, fine-tuned   98.2 ± 0.7                   96.3 ± 1.0
FedAvg               93.1 ± 1.1    (-5.1 ± 1.1)   95.3 ± 1.0    (-1.0 ± 1.6)
local only           98.2 ± 0.4    (0.0 ± 1.0)    86.6 ± 2.2    (-9.7 ± 1.8)
FedBABU              96.7 ± 2.0    (-1.5 ± 1.9)   87.2 ± 2.8    (-9.0 ± 3.4)
LG-FedAvg            98.3 ± 0.5    (+0.1 ± 0.9)   89.4 ± 1.5    (-6.9 ± 1.3)
FedPer               97.6 ± 0.7    (-0.6 ± 1.3)   92.4 ± 1.5    (-3.9 ± 1.6)
FedRep               96.8 ± 1.3    (-1.4 ± 1.6)   92.0 ± 2.3    (-4.3 ± 2.1)
Ditto                98.4 ± 0.5    (+0.2 ± 1.0)   94.7 ± 0.6    (-1.6 ± 1.4)
pFedMe               98.6 ± 0.6    (+0.4 ± 0.6)   96.1 ± 1.1    (-0.2 ± 0.8)
APFL                 98.7 ± 0.4    (+0.5 ± 0.7)   96.0 ± 0.7    (-0.3 ± 0.9)
===================  ============  =============  ============  =============

14 images are enough to distinguish two classes of digits: no method with a model for each client
is ahead of fine-tuned FedAvg or behind it. With five classes a client needs the others: local
training loses ten points. Fine-tuned FedAvg is then level with pFedMe, APFL and FedAvg, and ahead
of the rest.
"""

import sys
from functools import partial

import jax
import numpy as np

from fedjax_lab import algorithms, data, models, simulate
from fedjax_lab.estimates import estimate, format_estimate
from fedjax_lab.simulation.evaluate_personal import (
    build_personal_evaluation,
    client_models,
    personal_scores,
)

LR = {"client_lr": 0.1}


def fine_tuned(loss_fn):
    """Return FedAvg whose clients take ten steps on their own data before they are evaluated."""
    fedavg = algorithms.fedavg(loss_fn, **LR)
    return algorithms.with_fine_tuning(fedavg, loss_fn, steps=10, **LR)


# name -> function of the loss
METHODS = {
    "FedAvg, fine-tuned": fine_tuned,
    "FedAvg": partial(algorithms.fedavg, **LR),
    "local only": partial(algorithms.local_only, **LR),
    "FedBABU": partial(algorithms.fedbabu, **LR),
    "LG-FedAvg": partial(algorithms.lg_fedavg, **LR),
    "FedPer": partial(algorithms.fedper, **LR),
    "FedRep": partial(algorithms.fedrep, **LR),
    "Ditto": partial(algorithms.ditto, prox_weight=0.1, **LR),
    "pFedMe": partial(algorithms.pfedme, **LR),
    "APFL": partial(algorithms.apfl, **LR),
}


def score(name, seed, rounds, classes):
    """Return the mean accuracy of the clients' models on their own test images."""
    train, test = data.load("digits")
    clients = data.partition(train, f"classes_per_client:{classes}", num_clients=100, seed=seed)
    tests = data.divide_like(clients, test, seed=seed)
    prepare = data.preprocess(scale=16)
    model = models.mlp(10, hidden=(32,))
    params = model.init(jax.random.key(seed), train.x[:1])
    algorithm = METHODS[name](models.classification_loss(model.apply, prepare))
    result = simulate(
        algorithm, params, clients, rounds=rounds, eval_every=rounds, cohort_size=10,
        local_steps=10, batch_size=16, seed=seed, client_map="scan",
    )  # fmt: skip
    evaluate = build_personal_evaluation(
        models.accuracy_counts(model.apply, prepare), client_models(algorithm, clients), tests
    )
    return float(personal_scores(evaluate(result.state), tests.sizes)["personal_accuracy"])


SOME = ("FedAvg, fine-tuned", "local only", "FedPer", "Ditto")


def main(rounds=30, seeds=range(2), classes=2, names=SOME):
    """Print each method's accuracy, and its difference from that of the first method."""
    first = None
    for name in names:
        found = np.array([100 * score(name, seed, rounds, classes) for seed in seeds])
        first = found if first is None else first
        mean, above = (format_estimate(estimate(list(x)), 1) for x in (found, found - first))
        print(f"{name}: accuracy {mean} %, above the first {above}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["all"]:
        main(100, range(5), int((*sys.argv, 2)[2]), METHODS)
    else:
        main()
