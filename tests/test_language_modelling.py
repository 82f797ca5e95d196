"""Text from end to end: perplexity, the command line, and what it refuses."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_lab import data, models
from fedjax_lab.command.cli import main
from fedjax_lab.simulation.evaluate import build_evaluation

LINES = ["the cat sat on the mat", "a dog ran to the red barn", "we all saw her"] * 60
VOCABULARY = 17  # 15 words, <unk> and <eos>
SETTINGS = [
    *("--partition", "contiguous", "--clip-norm", "0.25", "--client-lr", "10"),
    *("--sequence-length", "6", "--num-clients", "4", "--cohort-size", "4", "--batch-size", "5"),
    *("--local-steps", "10", "--rounds", "6", "--eval-every", "6", "--replace"),
    *("--client-map", "scan"),
]
LSTM = [
    *("--model", "lstm", "--model-option", "embedding=16", "--model-option", "hidden=16"),
    *("--model-option", "layers=1", "--model-option", "dropout=0.1"),
]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "farm.txt"
    path.write_text("\n".join(LINES))
    return path


def test_the_perplexity_of_equally_probable_words_is_their_number(text):
    train, test = data.load(f"text:{text}", sequence_length=6)
    assert data.num_classes(train) == VOCABULARY
    counts = models.token_counts(lambda params, x, key: jnp.zeros((*x.shape, VOCABULARY)))
    scores = build_evaluation(counts, test, 7)(None)
    np.testing.assert_allclose(scores["perplexity"], VOCABULARY, rtol=1e-5)
    # Equal logits: the first word, <unk>, is foretold, and it does not occur.
    assert scores["accuracy"] == 0


@pytest.mark.methods
def test_bytes_and_a_transformer_on_the_command_line(text, tmp_path, capsys):
    directory = tmp_path / "run"
    words = ["--dataset", f"text:{text}", "--tokens", "bytes", "--model", "transformer"]
    words += ["--model-option", "width=16", "--model-option", "depth=1", "--client-lr", "1"]
    words += ["--model-option", "num_heads=2", "--run-dir", str(directory)]
    assert main(["run", *SETTINGS, *words, "--rounds", "2", "--eval-every", "2"]) == 0
    shown = capsys.readouterr()
    length = len("\n".join(LINES)) + 1
    train, test = ((part - 1) // 6 for part in (length - length // 10, length // 10))
    assert f"{train} + {test} examples 6, 256 bytes" in shown.err
    config = json.loads((directory / "config.json").read_text())
    assert config["data"]["classes"] == 256
    assert config["run_config"]["tokens"] == "bytes"
    row = json.loads((directory / "metrics.jsonl").read_text().splitlines()[-1])
    assert row["perplexity"] == pytest.approx(np.exp(row["test_loss"]), rel=1e-5)
    assert row["perplexity"] < 250


@pytest.mark.slow
def test_perplexity_falls_from_end_to_end(text, tmp_path, capsys):
    directory = tmp_path / "run"
    arguments = ["--dataset", f"text:{text}", "--run-dir", str(directory)]
    assert main(["run", *SETTINGS, *LSTM, *arguments]) == 0
    shown = capsys.readouterr()
    assert "179 + 19 examples 6, 17 words" in shown.err
    row = json.loads((directory / "metrics.jsonl").read_text().splitlines()[-1])
    # The text repeats itself: nearly every word follows from the two before it.
    assert row["perplexity"] < VOCABULARY / 5
    assert row["perplexity"] == pytest.approx(np.exp(row["test_loss"]), rel=1e-5)
    assert row["accuracy"] > 0.5
    assert f"perplexity                 {row['perplexity']:.4g}" in shown.out
    partition = json.loads((directory / "partition.json").read_text())
    assert partition["spec"] == "contiguous"
    assert partition["label_histogram"] is None
    config = json.loads((directory / "config.json").read_text())
    assert config["data"]["classes"] == VOCABULARY
    assert config["run_config"]["sequence_length"] == 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([], "model is 'mlp'; text:"),
        ([*LSTM, "--partition", "dirichlet:0.1"], "Give iid, contiguous, quantity:A"),
        ([*LSTM, "--flip"], "flip is True and crop 0; they need images"),
        (
            ["--tokens", "letters"],
            "tokens is 'letters'; it must be one of bytes, characters, words",
        ),
        ([*LSTM, "--tokens", "bytes", "--vocabulary-size", "9"], "there are 256 bytes: leave"),
        (["--vocabulary-size", "1"], "vocabulary_size is 1; it must be at least 2"),
        ([*LSTM, "--sequence-length", "5000"], "sequence_length is 5000, which takes 5001 words"),
        (["--dataset", "text:missing.txt"], "there is no file or folder missing.txt"),
        (["--dataset", "digits"], "sequence_length is 6; digits is no text, so that"),
    ],
)
def test_settings_that_do_not_go_together(text, tmp_path, capsys, changes, message):
    arguments = ["--dataset", f"text:{text}", "--run-dir", str(tmp_path / "run"), *changes]
    assert main(["run", *SETTINGS, *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_model_of_text_needs_text(tmp_path, capsys):
    arguments = ["--dataset", "digits", "--run-dir", str(tmp_path / "run"), *LSTM]
    assert main(["run", *arguments, "--rounds", "1"]) == 2
    assert "model is 'lstm'; digits is no text: it must be one" in capsys.readouterr().err
