"""Train a model, then freeze its body and let other clients train its head alone.

python -m fedjax_lab.recipes.freeze_the_body
"""

import functools

import jax

from fedjax_lab import algorithms, build_evaluation, data, models, simulate, with_frozen


def main():
    """Print accuracy and bytes before, and after training the full model or its last layer."""
    train, test = data.load("digits")
    clients = data.partition(train, "dirichlet:0.3", num_clients=20, seed=0)
    first, others = data.split_clients(clients, 0.5, seed=0)
    prepare = data.preprocess(scale=16)
    model = models.mlp(10, hidden=(64, 32))
    params = model.init(jax.random.key(0), train.x[:1])
    loss = models.classification_loss(model.apply, prepare)
    counts = models.accuracy_counts(model.apply, prepare)
    fedavg = functools.partial(algorithms.fedavg, client_lr=0.1)
    settings = dict(cohort_size=5, local_steps=10, batch_size=16)
    params = simulate(fedavg(loss), params, first, rounds=20, **settings).params
    print(f"before: accuracy {float(build_evaluation(counts, test)(params)['accuracy']):.3f}")

    head = {"classifier": params["classifier"]}
    body = {name: layer for name, layer in params.items() if name not in head}

    def head_loss(head, examples, key, body):
        return loss({**body, **head}, examples, key)

    def head_counts(head, examples, body):
        return counts({**body, **head}, examples)

    frozen = with_frozen(fedavg, head_loss, body)
    of_head = build_evaluation(head_counts, test, frozen=body)
    for name, algorithm, trained, evaluate in (
        ("all of it", fedavg(loss), params, build_evaluation(counts, test)),
        ("its head", frozen, head, of_head),
    ):
        result = simulate(algorithm, trained, others, rounds=10, **settings)
        accuracy, sent = float(evaluate(result.params)["accuracy"]), algorithm.uplink(trained)
        print(f"{name}: accuracy {accuracy:.3f}, {sent:,} bytes up per client and round")


if __name__ == "__main__":
    main()
