"""Metrics of every local step, around any method."""

import dataclasses

from fedjax_lab.clients.metrics import OWN_METRICS, PER_CLIENT, Measure, add_measures, is_reserved
from fedjax_lab.round import Algorithm, Phase, check_algorithm


def with_client_metrics(algorithm: Algorithm, **measures: Measure) -> Algorithm:
    """Add metrics that are measured at each local step.

    ::

        with_client_metrics(algorithm, gradient_norm=lambda params, gradient: tree.norm(gradient))

    A metric is the mean over all local steps of the round's clients; in a row of the history, the
    mean over the rounds since the last row. Other numbers change only by rounding.

    Args:
      algorithm: any method.
      measures: name of the metric -> function (local params before the step, gradient of the
        mini-batch's mean loss at these params) -> scalar. The gradient is the raw one, before
        ``gradient_transform`` and the method's corrections. If a method computes several gradients
        in a step, it is the first one.

    Raises:
      TypeError: ``algorithm`` is no ``Algorithm``, a measure is no function, or (when a round is
        traced) it returns no real number.
      ValueError: there is no measure, or a name is reserved; or (when a round is traced) a measure
        does not return a scalar, or the loss has a metric of the same name.
    """
    check_algorithm(algorithm)
    if not measures:
        raise ValueError("measures is empty; pass at least one, such as gradient_norm=....")
    for name, measure in measures.items():
        if not callable(measure):
            raise TypeError(f"{name} is {measure!r}; it must be a function (params, gradient).")
        if is_reserved(name):
            raise ValueError(
                f"{name} is a reserved name, like the other metrics of the library: "
                f"{', '.join(sorted(OWN_METRICS))} and names that begin with {PER_CLIENT}. "
                "Choose another name."
            )

    def measured(phase: Phase) -> Phase:
        def client_update(received, row, batch):
            return phase.client_update(received, row, add_measures(batch, measures))

        return phase._replace(client_update=client_update)

    return dataclasses.replace(algorithm, phases=tuple(map(measured, algorithm.phases)))
