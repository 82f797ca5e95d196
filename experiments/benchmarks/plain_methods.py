"""Any method of the catalogue, with plain values of the hyperparameters that it requires."""

import inspect

_REQUIRED = {
    "compressor": "top_k:0.9",
    "inertia": 0.1,
    "memory_size": 20,
    "mixing": 0.1,
    "momentum": 0.9,
    "perturbation_radius": 0.05,
    "prox_weight": 0.01,
    "second_moment_decay": 0.9,
    "server_lr": 0.1,
}


def plain_method(name, loss_fn, model, preprocess, client_lr, memory_size=20, **options):
    """Build a method.

    Args:
      name: key of ``fedjax_lab.algorithms.ALGORITHMS``.
      loss_fn, model, preprocess: the factory gets the loss, or model and preprocessing.
      client_lr: learning rate.
      memory_size: of methods that require one.
      **options: arguments of the factory that replace the plain values.
    """
    import optax

    from fedjax_lab.algorithms import ALGORITHMS

    factory = ALGORITHMS[name]
    parameters = inspect.signature(factory).parameters
    known = {**_REQUIRED, "memory_size": memory_size, "server_optimizer": optax.adam(0.01)}
    required = [n for n, p in parameters.items() if p.default is p.empty and n in known]
    arguments = {n: known[n] for n in required} | options
    if "model" in parameters:
        return factory(model, client_lr=client_lr, preprocess=preprocess, **arguments)
    return factory(loss_fn, client_lr=client_lr, **arguments)
