"""The wheel as a stranger gets it: what is inside, its version, and ten tasks.

    python tests/packaging/check_wheel.py [--papers]

All in a temporary directory: a copy of the checkout is built (a build leaves files behind, and
picks up those that earlier ones left), the wheel is installed into a new virtual environment with
the versions of constraints.txt, and the tasks of ten_tasks.py are done in an empty home with no
other settings; with ``--papers`` those of paper_tasks.py instead, but for the one that needs
PyTorch. It needs Python, pip and a package index; minutes.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
import paper_tasks
import ten_tasks

ROOT = Path(__file__).parents[2]
LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv", "runs", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis"
)
DATA_FILES = {
    "fedjax_lab/py.typed",
    "fedjax_lab/data/digits.npz",
    "fedjax_lab/report/page.css",
}
METADATA = {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "top_level.txt", "licenses/LICENSE"}
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
EXTRAS = "pretrained,privacy,report,safetensors,tables,tensorboard,wandb"
EXTRA = "report,tables"  # the report draws figures; two tasks read a CSV file


def main(papers: bool = False) -> None:
    """Build, list, install, run; ends with an error at the first thing that is not as it should."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fedjax-lab-wheel-") as name:
        folder = Path(name)
        wheel = build(folder)
        version = wheel.name.split("-")[1]
        check_content(wheel, version)
        check_pythons(wheel)
        bin = install(wheel, folder / "venv")
        check_version(bin, version)
        tasks = paper_tasks.TASKS if papers else ten_tasks.TASKS
        ten_tasks.main([name for name in tasks if name != "torch"], bin / "python", bin, tasks)
    print(f"wheel-check: all is well after {time.monotonic() - began:.0f} s")


def build(folder: Path) -> Path:
    """Build the wheel of a copy of the checkout."""
    source = folder / "source"
    shutil.copytree(ROOT, source, ignore=LEFT_OUT)
    out = folder / "wheels"
    call(sys.executable, *PIP, "wheel", "--no-deps", "--wheel-dir", out, source)
    (wheel,) = out.iterdir()
    return wheel


def check_content(wheel: Path, version: str) -> None:
    """The package's modules, its data files and the metadata, and nothing else."""
    modules = {str(p.relative_to(ROOT)) for p in (ROOT / "fedjax_lab").rglob("*.py")}
    metadata = {f"fedjax_lab-{version}.dist-info/{name}" for name in METADATA}
    expected = modules | DATA_FILES | metadata
    with zipfile.ZipFile(wheel) as file:
        found = set(file.namelist())
    print(f"{wheel.name}: {len(found)} files, {wheel.stat().st_size / 1e3:,.0f} kB")
    for path in sorted(found):
        print(f"  {path}")
    if found != expected:
        sys.exit(f"missing: {sorted(expected - found)}; not wanted: {sorted(found - expected)}")


def check_pythons(wheel: Path) -> None:
    """Every Python that the wheel allows finds wheels of all that it needs."""
    for python in PYTHONS:
        versions = ("--python-version", python, "--only-binary", ":all:", "--target", "unused")
        # Of the extra `data` one package comes as source, for every Python.
        call(
            *(sys.executable, *PIP, "install", "--dry-run", *versions),
            *("--constraint", ROOT / "constraints.txt", f"{wheel}[{EXTRAS}]"),
        )
    print(f"Python {', '.join(PYTHONS)}: all that is needed has wheels")


def install(wheel: Path, venv: Path) -> Path:
    """A new environment with the wheel; returns its folder of commands."""
    call(sys.executable, "-m", "venv", venv)
    bin = venv / ("Scripts" if os.name == "nt" else "bin")
    call(
        bin / "python",
        *PIP,
        "install",
        "--constraint",
        ROOT / "constraints.txt",
        f"{wheel}[{EXTRA}]",
    )
    return bin


def check_version(bin: Path, version: str) -> None:
    """The command has the version of the wheel."""
    done = subprocess.run(
        [bin / "fedjax-lab", "--version"], stdout=subprocess.PIPE, text=True, check=True
    )
    if done.stdout != f"fedjax-lab {version}\n":
        sys.exit(f"--version prints {done.stdout!r}; the wheel has {version}")


def call(*command: object) -> None:
    """Run a command; a failure ends the check."""
    subprocess.run([str(part) for part in command], check=True)


PIP = ("-m", "pip", "--quiet", "--disable-pip-version-check")

if __name__ == "__main__":
    main("--papers" in sys.argv[1:])
