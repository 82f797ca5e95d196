"""Style, types and the tests that mirror what has changed: the inner loop, ``make check``.

A change to a method's file runs that method alone, a change to any other file the tests of the
same name and those that ``COVERS`` names. The whole suite is ``make test``.
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
# Test file -> the modules that it covers, of those without a test file of their own name.
COVERS = {
    "test_core_import": "__init__ estimates",
    "test_public_names": "__init__ algorithms/__init__ clients/__init__ command/__init__ "
    "compressors/__init__ data/__init__ machine/__init__ method/__init__ models/__init__ "
    "qp/__init__ recipes/__init__ report/__init__ simulation/__init__ storage/__init__ "
    "tuning/__init__ wrappers/__init__",
    "test_round": "clients/costs clients/results types",
    "test_wrong_calls": "checks signatures",
    "algorithms/test_bad_input": "clients/batch clients/transforms",
    "algorithms/test_factory": "algorithms/factory algorithms/hyper algorithms/server",
    "algorithms/test_gradma": "algorithms/gradma_correction algorithms/gradma_memory",
    "algorithms/test_masks": "clients/batch clients/local",
    "algorithms/test_personal": "algorithms/own_models clients/leaves",
    "clients/test_client_maps": "clients/local clients/mapping round",
    "clients/test_mask": "clients/metrics",
    "clients/test_nonfinite": "clients/finite",
    "command/test_bad_input": "command/config_checks",
    "command/test_cli": "__main__ command/catalogue command/listings command/runner command/screen "
    "command/reports",
    "command/test_commands": "command/sweeping command/launch command/rerun command/setup",
    "command/test_wrappers": "command/build command/config_checks",
    "command/test_config": "command/build command/config_checks command/config_file "
    "command/options command/settings",
    "command/test_factories": "command/own_code",
    "command/test_grid": "command/combinations command/launch",
    "command/test_own_data": "command/loaded_data command/loading",
    "command/test_personal": "command/client_model command/client_scores",
    "command/test_tables": "command/table_data",
    "command/test_unused": "command/commands",
    "compressors/test_catalogue": "compressors/by_name",
    "compressors/test_kernels": "compressors/base compressors/compose compressors/low_rank "
    "compressors/quantize compressors/sparsify",
    "compressors/test_wire": "compressors/sparsify",
    "data/test_chats": "data/conversations data/packing",
    "data/test_cohort": "data/client_sampling data/example_order data/local_work data/sampler "
    "data/uniform",
    "data/test_devices": "data/clock data/local_work",
    "data/test_times": "data/clock",
    "data/test_federated": "data/partition_plot",
    "data/test_image_sets": "data/cifar data/emnist data/image_folder",
    "data/test_natural": "data/tables",
    "data/test_partition": "data/heterogeneity data/schemes",
    "data/test_shakespeare": "data/plays",
    "data/test_sources": "data/files data/tfds machine/extras",
    "data/test_streams": "data/host_examples data/stream_files",
    "data/test_tables": "data/cells data/columns data/csv_files data/dtypes",
    "machine/test_target": "clients/host_devices machine/device_memory",
    "models/test_adapters": "models/adapter_files models/token_losses wrappers/ranks",
    "models/test_convolution": "machine/layout models/windows",
    "models/test_decoder": "models/decoder_config models/generation",
    "models/test_image_models": "models/resnet models/vgg models/vit",
    "models/test_losses": "models/label_checks",
    "models/test_lowering": "models/axis_order models/bilinear models/depthwise "
    "models/programs models/row_products",
    "models/test_models": "models/base models/cnn models/lenet models/linear models/mlp "
    "models/pooling",
    "models/test_weight_files": "models/pretrained models/weight_tables",
    "packaging/test_release": "version",
    "qp/test_project": "qp/dual qp/gram qp/joined_leaves qp/projected_gradient",
    "recipes/test_recipes": "recipes/*",
    "report/test_figures": "report/curves report/partition_figure report/style report/surfaces",
    "report/test_hostile_names": "markdown",
    "report/test_reading": "report/runs",
    "report/test_report": "report/cells report/statistics report/tables report/write",
    "report/test_sections": "report/csv_text report/formats",
    "report/test_settings": "report/pivot report/settings_table",
    "simulation/test_client_constants": "clients/store simulation/placement",
    "simulation/test_labels": "models/label_checks",
    "simulation/test_longer": "simulation/prepare simulation/identity simulation/run_folder "
    "simulation/run_log simulation/stopwatch",
    "simulation/test_model_axis": "clients/model_axis",
    "simulation/test_private_runs": "wrappers/ledger",
    "simulation/test_residuals": "qp/residuals simulation/divergence",
    "simulation/test_run": "simulation/computation simulation/prepare simulation/rounds "
    "simulation/simulate storage/checkpoint",
    "simulation/test_scores": "simulation/history",
    "simulation/test_stores": "simulation/chunk_planner simulation/chunks simulation/host_store",
    "simulation/test_streams": "simulation/client_data simulation/plan",
    "simulation/test_sweep": "simulation/divergence simulation/sweep_log "
    "simulation/sweep_points simulation/sweep_program simulation/sweep_result",
    "storage/test_hostile_dirs": "machine/json_file storage/run_path",
    "storage/test_run_dir": "storage/fingerprint storage/lock storage/rows",
    "tuning/test_search": "tuning/halving tuning/search_log tuning/proposals",
    "tuning/test_tune": "command/tuning report/search_figure tuning/candidates tuning/search "
    "tuning/search_result tuning/score tuning/space",
    "wrappers/test_update_metrics": "simulation/client_updates",
    "wrappers/test_privacy": "wrappers/accountants",
    "wrappers/test_robust": "wrappers/rules wrappers/client_messages",
}
TWINS = "tests/reference"  # whose own tests have the mark "methods"
# Files that several methods share -> methods that show whether they still work.
SHARED = {
    "averaging": ["fedavg", "fedexp", "fedopt"],
    "base": ["fedavg", "scaffold"],
    "factory": ["fedavg", "scaffold"],
    "authors_codes": ["fedavg"],
    "first_estimates": ["fafed", "stem"],
    "gradma_correction": ["gradma_s", "gradma_w"],
    "gradma_memory": ["gradma_s"],
    "hyper": ["fedavg", "fedprox"],
    "own_models": ["apfl", "ditto"],
    "personal": ["apfl", "ditto", "fedper"],
    "server": ["fedavg", "feddyn", "fedopt"],
}


def covering_tests(path: str) -> list[str]:
    """The test files that cover a module of ``fedjax_lab``: of its own name, or in ``COVERS``."""
    module = Path(path).relative_to("fedjax_lab").with_suffix("")
    own = ROOT.joinpath("tests", module.parent).glob(f"test_{module.name}*.py")
    files = {str(file.relative_to(ROOT)) for file in own}
    for tests, modules in COVERS.items():
        if {str(module), f"{module.parent}/*"} & set(modules.split()):
            files.add(f"tests/{tests}.py")
    return sorted(files)


def changed_files(since: str) -> list[str]:
    """Paths that differ from a commit, and those that git does not know yet."""

    def git(*words):
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    paths = {*git("diff", "--name-only", since), *git("ls-files", "--others", "--exclude-standard")}
    return sorted(path for path in paths if (ROOT / path).is_file())


def methods_of(stem: str) -> list[str]:
    """The factories that a file of ``fedjax_lab/algorithms`` defines, or some that use it."""
    from fedjax_lab.algorithms import ALGORITHMS

    return SHARED.get(stem) or [
        name
        for name, factory in ALGORITHMS.items()
        if inspect.getmodule(inspect.unwrap(factory)).__name__.split(".")[-1] == stem
    ]


def tests_for(path: str) -> tuple[list[str], list[str]]:
    """(test files, methods) that a changed file asks for."""
    parts = Path(path).parts
    stem = Path(path).stem
    if parts[0] == "tests" and stem.startswith("test_") and parts[1] != "reference":
        return [path], []
    if parts[0] == "fedjax_lab" and path.endswith(".py"):
        in_algorithms = parts[1] == "algorithms"
        return covering_tests(path), methods_of(stem) if in_algorithms else []
    if parts[:3] in [("tests", "algorithms", k) for k in ("cases", "limits")]:
        return covering_tests(f"fedjax_lab/algorithms/{stem}.py"), methods_of(stem)
    if parts[:2] == ("tests", "reference"):
        module = f"fedjax_lab/algorithms/{stem.removesuffix('_numpy')}.py"
        files, methods = tests_for(module) if (ROOT / module).is_file() else ([], [])
        return [*files, TWINS], methods
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
    if TWINS in files:
        files.remove(TWINS)
        steps += [[*run, "pytest", "-m", "methods", TWINS]]
    if files:
        chosen = ["--methods", *sorted(methods)] if methods else []
        steps += [[*run, "pytest", "--long", "--numprocesses", "2", *sorted(files), *chosen]]
    for step in steps:
        print("$", " ".join(step[2:]), flush=True)
        if status := subprocess.run(step, cwd=ROOT, check=False).returncode:
            return status
    print(f"{len(changed)} changed files checked in {time.perf_counter() - began:.0f} s.")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
