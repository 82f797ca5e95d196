"""Metrics of every local step, around any method."""

import dataclasses

from fedjax_lab.clients.metrics import OWN_METRICS, Measure, add_measures
from fedjax_lab.round import Algorithm, Phase, check_algorithm


def with_client_metrics(algorithm: Algorithm, **measures: Measure) -> Algorithm:
    """The same method, whose metrics have what is measured at each local step.

    ::

        with_client_metrics(algorithm, gradient_norm=lambda params, gradient: tree.norm(gradient))

    A metric is the mean over all steps that the round's clients take, and in a row of the history
    over the rounds since the last one. No other number changes, but for rounding.

    Args:
      algorithm: any method.
      measures: name of the metric -> (local params before the step, gradient of its mini-batch's
        mean loss there) -> scalar. Of a method that takes several gradients in a step it is the
        first one. It is the raw gradient: ``gradient_transform`` and the method's corrections come
        after it.

    Raises:
      TypeError: ``algorithm`` is none, or a measure is no function.
      ValueError: there is none, or its name is one of the library's; or (when a round is traced) it
        returns no scalar, or the loss has a metric of that name.
    """
    check_algorithm(algorithm)
    if not measures:
        raise ValueError("measures is empty; give at least one, such as gradient_norm=....")
    for name, measure in measures.items():
        if not callable(measure):
            raise TypeError(f"{name} is {measure!r}; it must be a function (params, gradient).")
        if name in OWN_METRICS:
            raise ValueError(
                f"{name} is a metric of the library's; choose a name besides "
                f"{', '.join(sorted(OWN_METRICS))}."
            )

    def measured(phase: Phase) -> Phase:
        def client_update(received, row, batch):
            return phase.client_update(received, row, add_measures(batch, measures))

        return phase._replace(client_update=client_update)

    return dataclasses.replace(algorithm, phases=tuple(map(measured, algorithm.phases)))
