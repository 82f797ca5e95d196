"""Every program of the library compiled for TPUs and GPUs, by their own compilers, without them.

    python -m experiments.benchmarks.accelerators --target v5e|h200 [--rows FILE] [--subset ci]
        [--only TEXT ...] [--minutes M] [--list]
    python -m experiments.benchmarks.accelerators --table [--rows FILE]

A program's row is added to FILE as soon as it is compiled; one that is there is not compiled again.
``make accelerator-check`` does this in an environment for each compiler and writes the tables of
docs/accelerators.md. Unless a program's name says otherwise it is one round, with its sampling, of
the MLP 784-200-100-10 on images of 28 x 28 pixels: N = 100, S = 10, K = 5, B = 64.
"""

import argparse
import collections
import dataclasses
import functools
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROWS = Path("experiments/benchmarks/accelerators.jsonl")
PAGE = Path("docs/accelerators.md")
MARK = "<!-- What follows is written by `make accelerator-check`. -->\n"
TITLES = {
    "methods": "Methods",
    "models": "Models",
    "convolutions": "Convolutions",
    "planner": 'What "auto" chooses',
    "compressors": "Compressors",
    "runs": "Whole runs",
    "notebooks": "The notebooks' programs",
}
TARGETS = ("v5e", "v5e:2x2", "v5e:2x4", "v5e:16x16", "h200", "h200:4", "h200:8")
ON_PAGE = {"One device": ("v5e", "h200"), "Several devices": ("v5e:2x2", "h200:8")}  # of methods
MAPS = ("vmap", "scan", "chunk:5", "shard_map", "pmap")
_CLIENT = {"client_lr": 0.1}
_BOTH = {**_CLIENT, "server_lr": 1.0}
_ADAPTIVE = {**_CLIENT, "server_lr": 0.01}
_AVERAGING = {**_CLIENT, "server_lr": 1.5, "final_lr_ratio": 0.1}
_MOMENTUM = {"momentum": 0.5}
_MU, _RADIUS = {"prox_weight": 0.01}, {"perturbation_radius": 0.05}
_MEMORY = {"server_momentum": 0.5, "memory_decay": 0.5, "memory_size": 100}
_SPEED = {**_BOTH, **_RADIUS, "prox_weight": 0.1}
# Row -> an example of each hyperparameter, and the method where it has another name.
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": _BOTH,
    "fedprox": {**_BOTH, **_MU},
    "fednova": _BOTH,
    "fedavgm": {**_BOTH, **_MOMENTUM},
    "fedproxm": {**_BOTH, **_MU, **_MOMENTUM},
    "fedadagrad": {**_ADAPTIVE, "tau": 0.001},
    "fedadam": {**_ADAPTIVE, "tau": 0.001},
    "fedyogi": {**_ADAPTIVE, "tau": 0.001},
    "fedams": {**_ADAPTIVE, "tau": 1e-6},
    "scaffold": _BOTH,
    "feddyn": {**_CLIENT, **_MU},
    "fedadmm W": {"algorithm": "fedadmm", **_CLIENT, **_MU, "variant": "W"},
    "fedadmm G": {"algorithm": "fedadmm", **_BOTH, **_MU, "variant": "G"},
    "fedpd": {**_CLIENT, "prox_weight": 0.1},
    "mifa": _BOTH,
    "mifam": {**_BOTH, **_MOMENTUM},
    "moon": {**_BOTH, "contrastive_weight": 1.0},
    "moonm": {**_BOTH, "contrastive_weight": 1.0, **_MOMENTUM},
    "fedmlb": _BOTH,
    "fedmlbm": {**_BOTH, **_MOMENTUM},
    "fedcm": {**_BOTH, "mixing": 0.1},
    "mimelite": {**_BOTH, **_MOMENTUM},
    "mime": {**_BOTH, **_MOMENTUM},
    "fedacg": {**_CLIENT, "prox_weight": 0.001, "momentum": 0.85},
    "stem": {**_CLIENT, "momentum": 0.1},
    "naive adaptive": {
        **{"algorithm": "naive_adaptive_fedavg", "client_lr": 0.01},
        **{"second_moment_decay": 0.99, "initial_second_moment": 0.01},
    },
    "fafed": {**_CLIENT, "momentum": 0.1, "second_moment_decay": 0.9},
    "fedsam": {**_BOTH, **_RADIUS},
    "fedasam": {**_BOTH, "perturbation_radius": 0.5},
    "mofedsam": {**_BOTH, **_RADIUS, "mixing": 0.1},
    "fedgamma": {**_BOTH, **_RADIUS},
    "fedlesam": {**_BOTH, **_RADIUS},
    "fedlesam-S": {"algorithm": "fedlesam", **_BOTH, **_RADIUS, "variant": "S"},
    "fedlesam-D": {"algorithm": "fedlesam", **_CLIENT, **_MU, **_RADIUS, "variant": "D"},
    "fedsmoo": {**_CLIENT, **_MU, **_RADIUS},
    "fedspeed": _SPEED,
    "fedspeed_ing": {**_SPEED, "inertia": 0.1},
    "fedswa": _AVERAGING,
    "fedmo": {**_CLIENT, "momentum": 0.2},
    "fedmoswa": {**_AVERAGING, "momentum": 0.2},
    "cfedavg": {**_BOTH, "compressor": "top_k:0.9"},
    "gradma_w": _BOTH,
    "gradma_s": {**_BOTH, **_MEMORY},
    "gradma": {**_BOTH, **_MEMORY},
}
FIRST = ("fedavg", "scaffold", "fedmoswa", "fedspeed", "fafed", "cfedavg top-k", "gradma")
IMAGES = {
    "lenet5": (64, 32, 3),
    "cnn": (50, 28, 1),
    "resnet20": (50, 32, 3),
    "resnet18": (50, 32, 3),
}
COMPRESSED = (
    *("identity", "bfloat16", "int8", "sign", "terngrad", "qsgd:15", "low_rank:4"),
    *("top_k:0.99", "random_k:0.99", "random_drop:0.99", "top_k:0.99+qsgd:15"),
)
CI = (
    *("fedavg vmap", "scaffold vmap", "fedavg shard_map", "fedavg pmap"),
    "fedavg chunk of 10 rounds",
)


class Program(NamedTuple):
    """What is compiled.

    Attributes:
      group: a section of the page.
      name: within it.
      target: name of a machine.
      make: () -> (Target, jitted function, shapes, static arguments, what else the row says).
    """

    group: str
    name: str
    target: str
    make: Callable[[], tuple[Any, ...]]

    @property
    def key(self) -> str:
        """What names its row."""
        return f"{self.target} | {self.group} | {self.name}"


@functools.lru_cache(maxsize=1)  # programs of one model follow each other
def task(
    model="mlp",
    size=28,
    channels=1,
    batch_size=64,
    cohort=10,
    steps=5,
    num_clients=100,
    digits=False,
    compute_dtype="float32",
):
    """(clients, model, shapes of its params, preprocess, loss, schedule)."""
    import jax

    from fedjax_lab import data, models
    from fedjax_lab.data.cohort import Schedule

    examples = data.synthetic.noise_images(40 * num_clients, (size, size, channels), seed=0)
    if digits:
        examples, _ = data.load("digits")
    clients = data.partition(examples, "iid", num_clients=num_clients, seed=0)
    network, preprocess = models.build(model, num_classes=10), data.preprocess()
    network = models.mixed_precision(network, compute_dtype)
    params = jax.eval_shape(network.init, jax.random.key(0), examples.x[:1])
    loss_fn = models.classification_loss(network.apply, preprocess)
    schedule = Schedule(cohort_size=cohort, batch_size=batch_size, local_steps=steps)
    return clients, network, params, preprocess, loss_fn, schedule


def method(name, network, preprocess, loss_fn):
    """A method of the catalogue, by its name there or as "cfedavg top-k"."""
    from fedjax_lab import algorithms
    from fedjax_lab.command.build import build_algorithm
    from fedjax_lab.command.config import RunConfig

    if name == "cfedavg top-k":
        return algorithms.cfedavg(loss_fn, client_lr=0.1, compressor="top_k:0.99")
    if name == "gradma of 40":
        return algorithms.gradma(loss_fn, client_lr=0.1, memory_size=40)
    option = dict(METHODS[name])
    settings = {"num_clients": 100, "cohort_size": 10, "algorithm": option.pop("algorithm", name)}
    settings |= {rate: option.pop(rate) for rate in ("client_lr", "server_lr") if rate in option}
    config = RunConfig.from_dict({**settings, "option": option})
    return build_algorithm(config.resolve(), loss_fn, network, preprocess)


def machine(name, convolution=None):
    """A target with its compiler's devices."""
    from fedjax_lab.machine.compiler import with_devices
    from fedjax_lab.machine.target import named

    return dataclasses.replace(with_devices(named(name)), convolution=convolution)


def one_round(
    target, client_map="vmap", length=1, convolution=None, name="fedavg", wrap=None, **options
):
    """A chunk of rounds, as ``Program.make`` returns it; with "auto" as the planner has it."""
    import jax

    from fedjax_lab import tree
    from fedjax_lab.simulation.chunk_planner import ChunkPlanner
    from fedjax_lab.simulation.computation import Computation
    from fedjax_lab.simulation.placement import Request

    where = machine(target, convolution)
    clients, network, params, preprocess, loss_fn, schedule = task(**options)
    if name == "adapters":
        algorithm, params, _ = adapters(clients, preprocess)
    else:
        algorithm = method(name, network, preprocess, loss_fn)
    algorithm = algorithm if wrap is None else wrap(algorithm)
    key = jax.random.key(0)
    run = Computation(algorithm, schedule, key=key, params=params)
    asked = Request.of("auto", target=where)
    planner = ChunkPlanner(run, asked, run.shapes(clients), clients)
    more = {"model_bytes": tree.nbytes(params)}
    if client_map == "auto":
        client_map = more["client_map"] = planner.choose_map(length).client_map
    (function, *shapes), named = planner.program(client_map, length)
    more["compiled"] = planner.compiled(client_map, length)
    return where, function, shapes, named, more


def adapters(clients, preprocess):
    """(FedAvg that trains adapters beside a frozen transformer's attention, their shapes, those of
    the transformer)."""
    import jax

    from fedjax_lab import algorithms, models, with_frozen

    model = models.vit(10, patch_size=2, width=64, depth=2, num_heads=2)
    loss_fn = models.classification_loss(model.apply, preprocess)
    frozen = jax.eval_shape(model.init, jax.random.key(0), clients.examples.x[:1])

    def is_adapted(path):
        return path.endswith("kernel") and ("attention" in path or "dense" in path)

    def init(key):
        return models.init_adapters(key, frozen, is_adapted, 4)

    def lora_loss(params, examples, key, frozen):
        return loss_fn(models.merge_adapters(frozen, params, 2.0), examples, key)

    def fedavg(loss_fn):
        return algorithms.fedavg(loss_fn, client_lr=0.01)

    params = jax.eval_shape(init, jax.random.key(1))
    return with_frozen(fedavg, lora_loss, frozen), params, frozen


def evaluation(target):
    """The accuracy of an MLP on 10,000 images."""
    import jax

    from fedjax_lab import data, models
    from fedjax_lab.machine.compiler import abstract
    from fedjax_lab.machine.target import tracing_for
    from fedjax_lab.simulation.evaluate import build_evaluation

    where = machine(target)
    _, network, params, preprocess, _, _ = task()
    test = data.synthetic.noise_images(10_000, (28, 28, 1), seed=1)
    evaluate = build_evaluation(models.accuracy_counts(network.apply, preprocess), test)

    def score(params):
        with tracing_for(where):
            return evaluate(params)

    return where, jax.jit(score), [abstract(params, where.devices[:1])], {}, {}


def sweep(target, rates=4, seeds=3, **options):
    """Runs of FedAvg, ``rates`` learning rates by ``seeds`` seeds, as one program of one round."""
    import jax
    import jax.numpy as jnp

    from fedjax_lab import algorithms
    from fedjax_lab.clients.mapping import parse_client_map
    from fedjax_lab.machine.compiler import abstract
    from fedjax_lab.simulation.computation import Computation
    from fedjax_lab.simulation.placement import Placement
    from fedjax_lab.simulation.sweep_program import Program as SweepProgram

    where, vmap = machine(target), Placement(parse_client_map("vmap"))
    clients, _, params, _, loss_fn, schedule = task(**options)
    count = rates * seeds

    build = functools.partial(algorithms.fedavg, loss_fn)
    run = Computation(build(client_lr=0.1), schedule)
    program = SweepProgram(run, build, clients, vmap, vmap)
    runs = (
        jax.eval_shape(lambda p: jax.tree.map(lambda leaf: jnp.stack([leaf] * count), p), params),
        jax.random.split(jax.random.key(0), count),
        {"client_lr": jnp.linspace(0.01, 0.1, count)},
    )
    states = jax.eval_shape(program.start_runs, (clients, ()), runs)

    def advance(states, runs, shared):
        return program.advance_runs(1, states, runs, shared)

    shapes = (states, (*runs[1:], ()), (clients, (), (), jnp.zeros((), jnp.int32)))
    places = abstract(shapes, where.devices[:1])
    return where, jax.jit(advance, donate_argnums=0), places, {}, {}


def programs(target: str) -> list[Program]:
    """All that are compiled for a chip ("v5e" or "h200"), the most telling ones first."""
    from fedjax_lab import models
    from fedjax_lab.wrappers.compression import with_compression

    several = {"v5e": ("v5e:2x2", "v5e:2x4"), "h200": ("h200:4", "h200:8")}[target]
    found: list[Program] = []

    def add(group, name, make, where=target):
        found.append(Program(group, name, where, make))

    def rounds(where=target, **options):
        return functools.partial(one_round, where, **options)

    names = [*FIRST, *(name for name in METHODS if name not in FIRST)]

    def methods(client_map):
        for name in names:
            add("methods", f"{name} {client_map}", rounds(name=name, client_map=client_map))

    def spread(client_map):
        for name in names:
            for where in several:
                options = {"name": name, "client_map": client_map, "cohort": 16}
                add("methods", f"{name} {client_map}", rounds(where, **options), where)

    methods("vmap")
    spread("shard_map")
    if target == "v5e":
        options = {"client_map": "shard_map", "cohort": 256, "num_clients": 256}
        add("methods", "fedavg shard_map, S=256", rounds("v5e:16x16", **options), "v5e:16x16")
    for text in COMPRESSED:

        def wrap(algorithm, text=text):
            return with_compression(algorithm, text)

        add("compressors", f"fedavg with {text}", rounds(wrap=wrap))
    for name in models.MODELS:
        if name not in models.LANGUAGE_MODELS and name != "vit_base":
            shape = {"model": name, "size": 32, "channels": 3, "steps": 1}
            add("models", f"{name} vmap", rounds(**shape))
    for name in IMAGES:
        batch_size, size, channels = IMAGES[name]
        shape = {"model": name, "batch_size": batch_size, "size": size, "channels": channels}
        choices = [("lax", "vmap", 10), ("lax", "scan", 1), ("im2col", "vmap", 10)]
        for convolution, client_map, cohort in choices:
            options = {"client_map": client_map, "convolution": convolution, "cohort": cohort}
            label = f"{name} {client_map} {convolution}, one step, S={cohort}"
            add("convolutions", label, rounds(**shape, **options, steps=1))
    lenet = {"model": "lenet5", "batch_size": 64, "size": 32, "channels": 3, "steps": 1}
    for cohort in (100, 300):
        options = {**lenet, "client_map": "auto", "cohort": cohort, "num_clients": 300}
        add("planner", f"lenet5 S={cohort} auto", rounds(**options))
    add("runs", "fedavg chunk of 10 rounds", rounds(length=10))
    add("runs", "evaluation, 10,000 examples", lambda: evaluation(target))
    add("runs", "sweep of 12 runs", lambda: sweep(target))
    small = {"digits": True, "num_clients": 40, "batch_size": 16, "cohort": 16, "length": 10}
    for name in ("fedavg", "scaffold", "gradma of 40"):
        for where in (target, several[-1]):
            options = {**small, "name": name, "client_map": "shard_map"}
            add("notebooks", f"quick start: {name}, 10 rounds", rounds(where, **options), where)
    options = {"digits": True, "num_clients": 20, "batch_size": 16}

    def compress(algorithm):
        return with_compression(algorithm, "top_k:0.99+qsgd:15")

    add("notebooks", "message compression", rounds(wrap=compress, length=5, **options))
    add(
        *("notebooks", "seeds and learning rates: 30 runs"),
        lambda: sweep(target, 6, 5, cohort=5, **options),
    )
    lora = {"name": "adapters", "digits": True, "num_clients": 10, "cohort": 5, "batch_size": 16}
    add("notebooks", "adapters of a transformer, 5 rounds", rounds(length=5, **lora))
    methods("scan")
    methods("chunk:5")
    spread("pmap")
    return found


def row_of(program: Program) -> dict[str, Any]:
    """Compile a program; what its compiler says, or why it does not compile."""
    import jax

    from fedjax_lab.machine.compiler import compile_for, figures

    row = {"target": program.target, "group": program.group, "name": program.name}
    row["jax"] = jax.__version__
    try:
        where, function, shapes, static, more = program.make()
        compiled = more.pop("compiled", None)
        if compiled is None:
            compiled, _ = compile_for(where, function, *shapes, **static)
        found = figures(compiled)
    except Exception as error:  # whatever it is, the page says it and the next program's turn comes
        return {**row, "error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    return {
        **row,
        **more,
        "arguments": found.arguments,
        "temporaries": found.temporaries,
        "code": found.code,
        "memory": found.memory,
        "collectives": {c.kind: [c.times, c.bytes] for c in found.collectives},
    }


def read_rows(file: Path) -> dict[str, dict[str, Any]]:
    """The rows that are kept, by their program's key."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    rows = [json.loads(line) for line in lines]
    return {f"{row['target']} | {row['group']} | {row['name']}": row for row in rows}


def write(rows: Mapping[str, Mapping[str, Any]], planned: Iterable[tuple[str, str]], page: Path):
    """Write the tables below the page's mark.

    Args:
      rows: by their programs' keys.
      planned: (group, key) of all programs.
      page: a Markdown file that has the mark.
    """
    text, mark, _ = page.read_text(encoding="utf-8").partition(MARK)
    if not mark:
        raise ValueError(f"{page} has no line {MARK.strip()}")
    all_keys = list(planned)
    order = {key: place for place, (_, key) in enumerate(all_keys)}
    known = sorted(rows, key=lambda key: (order.get(key, len(order)), key))
    parts = [text + mark]
    for group, title in TITLES.items():
        found = [rows[key] for key in known if rows[key]["group"] == group]
        parts.append(f"\n## {title}\n\n{compiled_of(found)}\n\n")
        parts.append(methods_table(found) if group == "methods" else table(found))
        missing = [key for of, key in all_keys if of == group and key not in rows]
        if missing:
            targets = collections.Counter(key.split(" | ")[0] for key in missing)
            counts = ", ".join(f"{count} for {target}" for target, count in targets.items())
            parts.append(f"\nNot run: {len(missing)} of these programs ({counts}).\n")
    page.write_text("".join(parts), encoding="utf-8")


def compiled_of(found) -> str:
    """How many programs compile for each target, in words."""
    total = collections.Counter(row["target"] for row in found)
    failed = collections.Counter(row["target"] for row in found if "error" in row)
    parts = [f"{total[t] - failed[t]} of {total[t]} for {t}" for t in TARGETS if total[t]]
    return f"Compiled: {', '.join(parts) or 'none was run'}."


def table(found) -> str:
    """A line for each program and a column for each target: memory, client map, collectives."""
    cells: dict[str, dict[str, str]] = {}
    for row in found:
        cells.setdefault(row["name"], {})[row["target"]] = memory_of(row)
    targets = [t for t in TARGETS if any(t in by_target for by_target in cells.values())]
    heads = [f"{target}: arguments + temporaries, MiB" for target in targets]
    lines = [f"| {' | '.join(['program', *heads])} |", "|---|" + "---|" * len(targets)]
    for name, by_target in cells.items():
        lines.append(f"| {' | '.join([name, *(by_target.get(t, '-') for t in targets)])} |")
    return "\n".join(lines) + "\n"


def memory_of(row) -> str:
    """What a program needs on one device, with its client map and collectives if it has them."""
    if "error" in row:
        return f"does not compile: {row['error'][:120]}"
    client_map = f" ({row['client_map']})" if row.get("client_map") else ""
    exchanged = f"; {collectives_of(row)}" if row["collectives"] else ""
    return f"{mib(row['arguments'])} + {mib(row['temporaries'])}{client_map}{exchanged}"


def methods_table(found) -> str:
    """Two tables of a line for each method, of one and of several devices of a kind.

    Temporaries under each map; of several devices, also the collectives of the first map.
    """
    cells: dict[str, dict[str, dict[str, Any]]] = {}
    for row in found:
        client_map = next(m for m in MAPS if f" {m}" in row["name"])
        name = row["name"].replace(f" {client_map}", "")
        cells.setdefault(name, {}).setdefault(row["target"], {})[client_map] = row
    texts = []
    for title, targets in ON_PAGE.items():
        maps = {
            t: [m for m in MAPS if any(m in of.get(t, {}) for of in cells.values())]
            for t in targets
        }
        maps = {target: used for target, used in maps.items() if used}
        heads, kinds = ["method"], ["---"]
        for target, used in maps.items():
            several = ":" in target
            heads += [f"{target}, MiB: {' · '.join(used)}"]
            heads += [f"{target}, collectives: {used[0]}"] * several
            kinds += ["---:"] + ["---"] * several
        lines = [f"### {title}\n", f"| {' | '.join(heads)} |", f"|{'|'.join(kinds)}|"]
        for name, of in cells.items():
            if not any(target in of for target in maps):
                continue
            line = [name]
            for target, used in maps.items():
                by_map = of.get(target, {})
                line += [" · ".join(temporaries_of(by_map.get(m)) for m in used)]
                if ":" in target:
                    row = by_map.get(used[0], {"error": ""})
                    line += ["-" if "error" in row else collectives_of(row)]
            lines.append(f"| {' | '.join(line)} |")
        if maps:
            texts.append("\n".join(lines))
    return "\n\n".join(texts) + "\n"


def temporaries_of(row) -> str:
    """The temporary memory of a program, or that it has none."""
    if row is None:
        return "-"
    return "does not compile" if "error" in row else mib(row["temporaries"])


def collectives_of(row) -> str:
    """Number and size of a program's collectives, in models where the row has their size."""
    size = row.get("model_bytes")
    parts = []
    for kind, (times, count) in row["collectives"].items():
        amount = f"{count / 1e6:.2f} MB" if size is None else f"{count / size:.2f} d"
        parts.append(f"{times} {kind}: {amount}")
    return ", ".join(parts) or "none"


def mib(count: float) -> str:
    """Bytes in MiB."""
    return f"{count / 2**20:,.1f}"


def main() -> None:
    """Compile what has no row yet, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", choices=("v5e", "h200"))
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--subset", choices=("all", "ci"), default="all")
    parser.add_argument("--only", nargs="+", default=[], help="texts, one of them in the name")
    parser.add_argument("--minutes", type=float, help="begin no program after so many")
    parser.add_argument("--list", action="store_true", help="name the programs")
    parser.add_argument("--table", action="store_true", help="write the tables of the page")
    arguments = parser.parse_args()
    if arguments.table:
        planned = [(p.group, p.key) for target in ("v5e", "h200") for p in programs(target)]
        write(read_rows(arguments.rows), planned, PAGE)
        return
    if arguments.target is None:
        parser.error("give --target, or --table.")
    import jax

    jax.config.update("jax_platforms", "cpu")
    chosen = programs(arguments.target)
    if arguments.subset == "ci":
        chosen = [p for p in chosen if p.name in CI and not p.target.endswith(("2x4", ":8"))]
    if arguments.only:
        chosen = [p for p in chosen if any(text in p.key for text in arguments.only)]
    if arguments.list:
        print("\n".join(program.key for program in chosen))
        return
    began, failed = time.monotonic(), 0
    for program in chosen:
        if arguments.subset != "ci" and program.key in read_rows(arguments.rows):
            continue  # read again each time: another process may add to them
        if arguments.minutes is not None and time.monotonic() - began > 60 * arguments.minutes:
            print(f"out of time before {program.key}", file=sys.stderr)
            break
        row = row_of(program)
        failed += "error" in row
        print(json.dumps(row), flush=True)
        if arguments.subset != "ci":
            with arguments.rows.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    sys.exit(1 if failed and arguments.subset == "ci" else 0)


if __name__ == "__main__":
    main()
