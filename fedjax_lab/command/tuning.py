"""``fedjax-lab tune``: hyperparameters of several methods by successive halving."""

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from fedjax_lab.checks import check_choice, check_share
from fedjax_lab.command.combinations import Assignment, options_of, read_assignments
from fedjax_lab.command.commands import PROG, TuneCommand
from fedjax_lab.command.config import RunConfig
from fedjax_lab.command.factories import check_known
from fedjax_lab.command.launch import DIVERGED, start
from fedjax_lab.command.screen import file_to_write
from fedjax_lab.command.sweeping import at_point, may_vary, parse_numbers, warn_of_attackers
from fedjax_lab.data import FederatedArrays
from fedjax_lab.machine.atomic_files import write_text
from fedjax_lab.report.search_figure import search_figure
from fedjax_lab.report.style import save
from fedjax_lab.simulation.sweep_points import check_seeds
from fedjax_lab.tuning.search_result import Diverged, SearchResult
from fedjax_lab.types import Params, PyTree

_LOG = "log:"


def tune_command(command: TuneCommand) -> int:
    """Tune, print the table and write the trials to a file; returns the exit status.

    Raises:
      ValueError, TypeError, OSError, ImportError: as ``setup.build`` and ``tune``.
    """
    methods = command.methods or (command.settings.method.algorithm,)
    for name in methods:
        check_known("algorithm", name, "methods")
    if len({*methods}) < len(methods):
        raise ValueError(f"methods is {' '.join(methods)}; it has a method twice.")
    given = command.settings.method.option
    spaces = {
        name: space_of(command.space, name, methods, options_of(given, name, methods))
        for name in methods
    }
    out, figure = file_to_write("out", command.out), file_to_write("figure", command.figure)
    start(command.cpu_devices, command.quiet)
    try:
        found = run_search(command, spaces)
        best = found.table()
    except Diverged as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return DIVERGED
    except KeyboardInterrupt:
        if command.keep_in is not None:
            print(
                f"\n{command.keep_in} has the finished batches; the same command resumes.",
                file=sys.stderr,
            )
        raise
    print(best)
    written = [path for path in (out, figure) if path is not None]
    if out is not None:
        write_text(out, found.markdown() if out.suffix == ".md" else found.csv())
    if figure is not None:
        save(search_figure(found), figure)
    if written:
        print("", *written, sep="\n")
    return 0


def space_of(
    texts: Iterable[str], method: str, methods: Iterable[str], options: Sequence[str] = ()
) -> dict[str, Any]:
    """Build the search space of one method for ``tune``.

    Args:
      texts: such as "client_lr=log:0.001:1", "momentum=0.5,0.9" or "scaffold.server_lr=0.5,1".
      options: options of the method as NAME=VALUE, on which its hyperparameters may depend.

    Raises:
      ValueError: a text has another form, or the method takes no such hyperparameter.
    """
    allowed = may_vary(RunConfig.of(algorithm=method, option=tuple(options)))
    found = _of_method("space", texts, method, list(methods), allowed)
    if not found:
        raise ValueError(
            f"space says nothing for {method}; give such as --space client_lr=log:0.001:1."
        )
    return {one.name: _values(one) for one in found}


def _of_method(
    argument: str,
    texts: Iterable[str],
    method: str,
    methods: Sequence[str],
    allowed: Sequence[str],
) -> list[Assignment]:
    """Return what NAME=... and METHOD.NAME=... say of one method, one for each name."""
    found: dict[str, Assignment] = {}
    given: set[tuple[str, str]] = set()
    for one in read_assignments(argument, texts, methods):
        is_of_others = not one.method and one.name not in allowed and len(methods) > 1
        if is_of_others or not one.is_of(method):
            continue
        check_choice(f"the name in {argument}", one.name, allowed)
        if (one.method, one.name) in given:
            raise ValueError(
                f"{argument} is {one.text!r}; {method} has a value for {one.name} already."
            )
        given.add((one.method, one.name))
        if one.method or (method, one.name) not in given:  # METHOD.NAME says more
            found[one.name] = one
    return list(found.values())


def start_points(
    texts: Iterable[str], spaces: dict[str, dict[str, Any]]
) -> dict[str, list[dict[str, float]]]:
    """Return the start point of each method of which ``texts`` say something.

    Raises:
      ValueError: a text has another form, or names nothing of the method's space.
    """
    found = {}
    for method, space in spaces.items():
        own = _of_method("start_point", texts, method, list(spaces), list(space))
        if own:
            found[method] = [{one.name: _number(one) for one in own}]
    return found


def _number(said: Assignment) -> float:
    try:
        return float(said.value)
    except ValueError:
        raise ValueError(
            f"start_point is {said.text!r}; it must be of the form name=value."
        ) from None


def _values(said: Assignment) -> Any:
    given, form = f"space is {said.text!r}", "name=log:low:high or name=value,value"
    if not said.value.startswith(_LOG):
        return parse_numbers(given, said.value, form)
    try:
        low, high = map(float, said.value.removeprefix(_LOG).split(":"))
    except ValueError:
        raise ValueError(f"{given}; it must be of the form {form}.") from None
    return low, high


def run_search(command: TuneCommand, spaces: dict[str, dict[str, Any]]) -> SearchResult:
    """Tune the methods of these spaces.

    Args:
      spaces: method -> hyperparameter -> its range or values, as ``space_of`` returns them.

    Raises:
      ValueError, TypeError, OSError, ImportError: as ``setup.build`` and ``tune``.
    """
    from fedjax_lab.command.setup import build
    from fedjax_lab.tuning.tune import divided, tune

    check_share("validation", command.validation)
    seed = check_seeds(command.seeds)[0]

    def trained(clients: FederatedArrays) -> FederatedArrays:
        return divided(clients, command.validation, command.hold_out, seed)[0]

    setups: dict[str, Any] = {}
    options, methods = command.settings.method.option, tuple(spaces)
    for name, space in spaces.items():
        first = {key: value[0] for key, value in space.items()}
        own = {"algorithm": name, "option": options_of(options, name, methods)}
        config = at_point(command.settings.replace(**own), first).resolve()
        setups[name] = build(config, trained=trained)
    warn_of_attackers("a search", command.settings, command.seeds)
    some = next(iter(setups.values()))
    measure = getattr(some.count_fn, "score", "accuracy")
    by_accuracy = command.score == "accuracy"
    if by_accuracy and measure != "accuracy":
        raise ValueError(f"score is 'accuracy'; this data set has {measure}: use loss.")

    def right(params: Params, examples: PyTree) -> jax.Array:
        return some.count_fn(params, examples)[0]

    schedule = config.schedule()
    return tune(
        {name: setup.vary for name, setup in setups.items()},
        spaces,
        some.params,
        some.clients,
        **{name: value for name, value in schedule.items() if name != "eval_every"},
        validation=command.validation,
        hold_out=command.hold_out,
        budget=command.budget,
        finalists=command.finalists,
        start_points=start_points(command.start_point, spaces),
        seeds=command.seeds,
        score=right if by_accuracy else None,
        mode="max" if by_accuracy else "min",
        average=command.average,
        sampler=command.sampler,
        run_dir=command.keep_in,
        progress=not command.quiet,
        lowering=config.machine.lowering,
    )
