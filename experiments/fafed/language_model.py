"""FAFED's Figure 1: an LSTM language model.

Paper: Wu et al., AAAI 2023, Figure 1 (training loss and perplexity, without printed numbers):
WikiText-2 cut among 16 clients that all take part, two LSTM layers of 650 units on vectors of 650,
dropout 0.5, batch 20, 10 local steps, gradients clipped at 0.25. Client learning rate 10 for
FedAvg, SCAFFOLD, FedAdam and FedAMS, server learning rate 0.03, factors 0.1 or 0.9; step sizes that
fall with the step for STEM and FAFED, in place of which there is a grid here.

    python -m experiments.fafed language_model
"""

import re
from pathlib import Path
from pydoc_data.topics import topics

from experiments.fafed.table_2 import FACTOR
from experiments.studies.study import Column, Method, Scale, Study
from fedjax_lab.machine import atomic_files

_TEXTS = Path("runs/text")
TEXT, WORDS = (_TEXTS / f"python_reference_{kind}.txt" for kind in ("letters", "words"))
OF_LETTERS, OF_WORDS = "Python's reference, letters", "Python's reference, two layers and words"
_SGD = {"client_lr": (10.0, 3.0, 1.0)}
_MORE = {"client_lr": (10.0, 20.0, 30.0)}
_ADAPTIVE = {"beta1": FACTOR, "beta2": FACTOR}
_FAFED = {"momentum": FACTOR, "second_moment_decay": FACTOR}
_SERVER_LR = 10**-1.5

METHODS = {
    "FedAvg": Method("fedavg", _SGD),
    "SCAFFOLD": Method("scaffold", _SGD),
    "STEM": Method("stem", _SGD, {"momentum": FACTOR}),
    "FedAdam": Method(
        "fedadam", _SGD, _ADAPTIVE, option={"tau": 0.01}, settings={"server_lr": _SERVER_LR}
    ),
    "FedAMS": Method(
        "fedams", _SGD, _ADAPTIVE, option={"tau": 1e-4}, settings={"server_lr": _SERVER_LR}
    ),
    # Where v is small, its step is 1 / rho = 100 times as long.
    "FAFED": Method("fafed", {"client_lr": (0.1, 0.03, 0.01)}, _FAFED),
    "FAFED, larger rates": Method("fafed", {"client_lr": (0.1, 0.2, 0.3, 0.5)}, _FAFED),
    "FedAvg, larger rates": Method("fedavg", _MORE),
    "SCAFFOLD, larger rates": Method("scaffold", _MORE),
    "STEM, larger rates": Method("stem", _MORE, {"momentum": FACTOR}),
}
_OF_LETTERS = tuple(METHODS)[:7]
_COMMON = {
    "model": "lstm",
    "partition": "contiguous",
    "num_clients": 16,
    "cohort_size": 16,
    "local_steps": 10,
    "clip_norm": 0.25,
}
_MACHINE = {
    **_COMMON,
    "dataset": f"text:{TEXT}",
    "model_option": {"embedding": 24, "hidden": 48, "layers": 1, "dropout": 0.0},
    "sequence_length": 20,
    "vocabulary_size": 40,
    "batch_size": 4,
    "rounds": 40,
    "eval_every": 5,
}
_TWO_LAYERS = {
    **_MACHINE,
    "dataset": f"text:{WORDS}",
    "model_option": {"embedding": 32, "hidden": 64, "layers": 2, "dropout": 0.0},
    "vocabulary_size": 500,
    "rounds": 60,
    "eval_every": 10,
}
_SMOKE = {
    **_MACHINE,
    "model_option": {"embedding": 8, "hidden": 8, "layers": 1, "dropout": 0.0},
    "local_steps": 2,
    "rounds": 4,
    "eval_every": 2,
}


def write_text() -> None:
    """Keep the texts of the machine scale: the language reference that Python has for ``help``.

    Once its characters are the words of the model, in small letters, with ``_`` for white space:
    400,000 in Python 3.11; other versions have a somewhat other text. Once its words and marks are.
    """
    lines = "\n".join(topics[name] for name in sorted(topics)).lower().splitlines()
    lines = [line for line in lines if line.strip()]
    of_words = (re.findall(r"\w+|[.,:;()]", line) for line in lines)
    _TEXTS.mkdir(parents=True, exist_ok=True)
    for path, tokens in (
        (TEXT, ("_".join(line.split()) for line in lines)),
        (WORDS, filter(None, of_words)),
    ):
        atomic_files.write_text(path, "\n".join(map(" ".join, tokens)) + "\n")


STUDY = Study(
    name="fafed/language_model",
    title="Figure 1: an LSTM language model",
    notes="""\
Scaled down to the machine: in place of WikiText-2 the language reference that every Python brings
along for `help()`, letter by letter (400,000 letters, cut into sequences of 20; the last tenth is
the test text), its 38 most frequent characters, one LSTM layer of 48 units on vectors of 24 (two
hardly begin to learn in so few steps), no dropout, batch 4, 40 rounds, ten seeds. And word by word,
as the paper has it, with its two layers: the 500 most frequent words and marks (86 % of the text),
64 units on vectors of 32, 60 rounds, five seeds. As in the paper: 16 clients, each with a piece of
the text, all in every round, 10 local steps, gradients clipped at 0.25, server_lr 10^-1.5 for
FedAdam and FedAMS, factors 0.1 or 0.9. Learning rates are tuned: the paper's 10, 3 or 1; for FAFED
0.1, 0.03 or 0.01, because with a small second moment its steps are 100 times as long. On letters
its grid ends where it does best, so that a row of its own has 0.1 to 0.5; on words, FedAvg,
SCAFFOLD and STEM, which chose 10, have rows with 10, 20 and 30. STEM's and FAFED's rates are
constant, where the paper's fall. Accuracy is the share of next letters, or words, foretold.""",
    methods=METHODS,
    scales={
        # Wants the text: --dataset text:FOLDER with WikiText-2's files.
        "paper": Scale(
            columns={
                "WikiText-2": Column(
                    {
                        **_COMMON,
                        "dataset": "text:wikitext-2",
                        "sequence_length": 35,
                        "batch_size": 20,
                        "rounds": 1000,
                        "eval_every": 20,
                    },
                    200,
                )
            },
            hardware="1 GPU",
            minutes=600,
        ),
        "machine": Scale(
            columns={
                OF_LETTERS: Column(_MACHINE, 20, methods=_OF_LETTERS),
                OF_WORDS: Column(_TWO_LAYERS, 20),
            },
            minutes=60,
            held_out=250,
        ),
        "smoke": Scale(
            columns={OF_LETTERS: Column(_SMOKE, 2)},
            hardware="any",
            minutes=1,
            seeds=(1,),
            held_out=250,
            grid_points=1,
            methods=("FedAvg", "FAFED"),
        ),
    },
)
