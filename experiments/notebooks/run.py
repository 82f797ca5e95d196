"""Run the notebooks as a reader would, keeping no outputs; or write them from their Python files.

    python -m experiments.notebooks.run [--devices N] [NAME ...]
    python -m experiments.notebooks.run --write

The .py file (jupytext's percent format) is the source; the .ipynb beside it is made of it, so that
Colab opens it. There the text of ``install.py`` stands in place of its import. Runs are small
(FEDJAX_LAB_QUICK=1), may do without an accelerator, and use this interpreter's packages;
``--devices 8`` gives them eight CPU devices.
"""

import argparse
import os
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).parent
NAMES = (
    "quick_start_tpu",
    "your_own_algorithm",
    "your_own_model_and_data",
    "message_compression",
    "seeds_and_learning_rates",
    "low_rank_adapters",
    "fine_tune_a_decoder",
)


# A cell of the .py files, in place of which the notebooks have the text of ``install.py``.
INSTALL = "from experiments.notebooks.install import QUICK"


def installing() -> str:
    """The code of ``install.py``, without its docstring."""
    text = (FOLDER / "install.py").read_text(encoding="utf-8")
    return text.partition('"""\n\n')[2].strip()


def execute(name: str, timeout: int = 600):
    """Run a notebook in a kernel of this interpreter, in the environment of this process.

    Returns the executed notebook (nbformat).

    Raises:
      nbclient.exceptions.CellExecutionError: a cell failed; the message has its traceback.
    """
    import nbformat
    from nbclient import NotebookClient

    # A kernel of the user's that is called python3 as well would be another interpreter.
    os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    client = NotebookClient(notebook, timeout=timeout, kernel_name="python3")
    return client.execute(cwd=str(FOLDER))


def write(name: str) -> None:
    """Make the .ipynb of a .py, without outputs; the same text gives the same bytes."""
    import jupytext

    notebook = jupytext.read(FOLDER / f"{name}.py")
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"
        if cell["source"] == INSTALL:
            cell["source"] = installing()
    jupytext.write(notebook, FOLDER / f"{name}.ipynb", fmt="ipynb")


def main() -> None:
    """Run or write the notebooks that the command line names; exit status 1 if one failed."""
    parser = argparse.ArgumentParser(description="Run the notebooks.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; or all")
    parser.add_argument("--devices", type=int, help="CPU devices; default: one for each core")
    parser.add_argument("--write", action="store_true", help="write the .ipynb files, run nothing")
    arguments = parser.parse_args()
    names = arguments.names or NAMES
    for name in names:
        if name not in NAMES:
            parser.error(f"NAME is {name!r}; it must be one of {', '.join(NAMES)}.")
    if arguments.write:
        for name in names:
            write(name)
        return
    os.environ |= {"FEDJAX_LAB_QUICK": "1", "FEDJAX_LAB_ALLOW_CPU": "1"}
    if arguments.devices is not None:
        os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(arguments.devices)}
    failed = []
    for name in names:
        began = time.perf_counter()
        try:
            execute(name)
        except Exception as error:  # the other notebooks run all the same
            failed.append(name)
            print(error, file=sys.stderr)
        verdict = "failed after" if name in failed else "ran in"
        print(f"{name} {verdict} {time.perf_counter() - began:.0f} s", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
