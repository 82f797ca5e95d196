"""Style, types and the tests that mirror what has changed: the inner loop, ``make check``.

A change to a method's file runs that method alone, a change to any other file the tests of the
same name, or of the same room where there are none. The whole suite is ``make test``.
"""

import inspect
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
# What is about the whole catalogue; ``--methods`` picks some of it.
CATALOGUE = [
    f"tests/algorithms/test_{name}.py" for name in ("contract", "twins", "limits", "bad_input")
]
# Files whose tests stand under another name.
MAPS = "tests/clients/test_client_maps.py"
MASKS = ["tests/algorithms/test_masks.py", "tests/algorithms/test_bad_input.py"]
ELSEWHERE = {
    "fedjax_lab/round.py": ["tests/test_round.py", MAPS],
    "fedjax_lab/clients/local.py": ["tests/clients/test_local.py", MAPS, *MASKS],
    "fedjax_lab/clients/mapping.py": ["tests/clients"],
    "fedjax_lab/clients/batch.py": MASKS,
} | {
    f"fedjax_lab/{room}/{stem}.py": [f"tests/{room}/test_{tests}.py"]
    for room, tests, stems in (
        ("command", "personal", ["client_scores"]),
        ("data", "chats", ["packing"]),
        ("data", "cohort", ["client_sampling"]),
        ("data", "partition", ["heterogeneity", "schemes"]),
        ("data", "sources", ["files", "tfds"]),
        ("data", "streams", ["stream_files"]),
        ("models", "adapters", ["adapter_files"]),
        ("models", "decoder", ["decoder_config"]),
        ("models", "image_models", ["resnet", "vgg", "vit"]),
        ("models", "models", ["cnn", "lenet", "linear", "mlp"]),
        ("models", "weight_files", ["pretrained", "weight_tables"]),
        ("report", "figures", ["curves", "partition_figure", "ranking", "style", "surfaces"]),
    )
    for stem in stems
}


def changed_files(since: str) -> list[str]:
    """Paths that differ from a commit, and those that git does not know yet."""

    def git(*words):
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    paths = {*git("diff", "--name-only", since), *git("ls-files", "--others", "--exclude-standard")}
    return sorted(path for path in paths if (ROOT / path).is_file())


def methods_of(stem: str) -> list[str]:
    """The factories that a file of ``fedjax_lab/algorithms`` defines."""
    from fedjax_lab.algorithms import ALGORITHMS

    return [
        name
        for name, factory in ALGORITHMS.items()
        if inspect.getmodule(inspect.unwrap(factory)).__name__.split(".")[-1] == stem
    ]


def tests_for(path: str) -> tuple[list[str], list[str]]:
    """(test files, methods) that a changed file asks for."""
    parts = Path(path).parts
    stem = Path(path).stem
    if path in ELSEWHERE:
        return ELSEWHERE[path], []
    if parts[0] == "tests" and stem.startswith("test_"):
        return [path], []
    is_family = parts[:2] in [("fedjax_lab", "algorithms"), ("tests", "reference")]
    if is_family or parts[:3] in [("tests", "algorithms", k) for k in ("cases", "limits")]:
        family = stem.removesuffix("_numpy")
        if methods := methods_of(family):
            own = sorted(ROOT.glob(f"tests/algorithms/test_{family}*.py"))
            return [str(file.relative_to(ROOT)) for file in own], methods
        return ["tests/reference"] if parts[0] == "tests" else CATALOGUE, []
    if parts[0] == "fedjax_lab" and path.endswith(".py"):
        room = ROOT.joinpath("tests", *parts[1:-1])
        own = sorted(room.glob(f"test_{stem}*.py")) or ([room] if len(parts) > 2 else [])
        return [str(file.relative_to(ROOT)) for file in own if file.exists()], []
    if parts[0] == "experiments" and len(parts) > 2 and path.endswith(".py"):
        room = ROOT / "tests" / "experiments"
        # What a paper declares is looked at with what all studies share.
        names = [n for n in (stem, parts[1], "studies") if [*room.glob(f"test_{n}*.py")]]
        own = sorted(room.glob(f"test_{names[0]}*.py"))
        return [str(file.relative_to(ROOT)) for file in own], []
    if parts[0] == "docs" or path == "README.md":
        return ["tests/docs/test_pages.py"], []
    return [], []


def main(since: str = "HEAD") -> int:
    """Run the checks; returns the exit status."""
    began = time.perf_counter()
    changed = changed_files(since)
    if not changed:
        print(f"Nothing has changed since {since}.")
        return 0
    python = [path for path in changed if path.endswith(".py")]
    files: set[str] = {"tests/test_house.py"} if python else set()
    methods: set[str] = set()
    for path in changed:
        more, names = tests_for(path)
        files.update(more)
        methods.update(names)
    run = [sys.executable, "-m"]
    steps = []
    if python:
        steps += [[*run, "ruff", "check", *python], [*run, "ruff", "format", "--check", *python]]
        steps += [[*run, "mypy"]]
    if methods:
        files.update(CATALOGUE)
    if files:
        chosen = ["--methods", *sorted(methods)] if methods else []
        steps += [[*run, "pytest", "--numprocesses", "2", *sorted(files), *chosen]]
    for step in steps:
        print("$", " ".join(step[2:]), flush=True)
        if status := subprocess.run(step, cwd=ROOT, check=False).returncode:
            return status
    print(f"{len(changed)} changed files checked in {time.perf_counter() - began:.0f} s.")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
