"""Mistakes on the command line and in files: each is an error that names what is wrong."""

import json

import pytest

from fedjax_lab.command import sweeping, tuning
from fedjax_lab.command.cli import main

FLAGS = {
    "--rounds": ("0", "-1", "1e20", "100000000000", "x", "1.5", ""),
    "--cohort-size": ("0", "101", "-3", "x"),
    "--num-clients": ("0", "-1", "x"),
    "--batch-size": ("0", "-1", "1e3"),
    "--local-steps": ("0", "-1", "x"),
    "--local-epochs": ("0", "-1"),
    "--eval-every": ("0", "-2", "x"),
    "--checkpoint-every": ("0", "x"),
    "--seed": ("-1", "1e23", "4294967296", "x", "1.5"),
    "--partition-seed": ("-1", "4294967296"),
    "--init-seed": ("-1", "4294967296"),
    "--client-lr": ("-0.1", "nan", "inf", "x"),
    "--server-lr": ("-1", "nan", "x"),
    "--client-lr-schedule": ("cos", "exponential", "exponential:0", "exponential:x", "constant:1"),
    "--clip-norm": ("0", "-1", "nan"),
    "--weight-decay": ("-1", "nan"),
    "--clip": ("step", "all", ""),
    "--algorithm": ("fedavgg", "", "FedAvg"),
    "--model": ("mlpp", "", "resnet"),
    "--dataset": ("digitz", "", "npz:", "npz:/nowhere.npz", "idx:/nowhere", "text:/nowhere"),
    "--data-dir": ("/nowhere/at/all",),
    "--partition": (
        "dirichlet:-1",
        "dirichlet:x",
        "classes_per_client:0",
        "iidd",
        "similarity:200",
    ),
    "--compressor": ("top_k", "top_k:2", "top_k:x", "qsgd:0", "zip", "top_k:0.9+"),
    "--downlink-compressor": ("top_k:1.5", "zip"),
    "--client-map": ("chunk", "chunk:0", "scan:2", "shard", "shard_map:99", "vmap/scan"),
    "--compute-dtype": ("float8", ""),
    "--weights": ("example", ""),
    "--log": ("csvv",),
    "--on-nonfinite": ("drop", ""),
    "--min-local-steps": ("0", "6", "99"),
    "--time-budget": ("0", "-1"),
    "--step-time": ("0", "-1"),
    "--step-time-spread": ("-1",),
    "--dropout": ("-0.1", "1", "2"),
    "--times": ("/nowhere.npz", ""),
    "--over-selection": ("0.5", "2"),
    "--deadline": ("0", "60"),
    "--concurrency": ("0", "4", "12"),
    "--min-client-size": ("-1", "x"),
    "--crop": ("-1", "9", "1000"),
    "--option": ("momentum=0.5", "novalue", "=1", "a b=1", "client_lr=1"),
    "--model-option": ("hidden=abc", "hidden=1.5", "hidden=true", "norm=7", "depth=3", "hidden="),
    "--config": ("/nowhere.yaml", "/nowhere.json"),
    "--cpu-devices": ("0", "-1", "x"),
    "--seeds": ("-1", "4294967296", "x", "1.5"),
    "--wrong-flag": ("1",),
}
METHODS = {  # options of methods, with their methods
    "gradma": ("margin=x", "memory_size=1.5", "keep_local_model=maybe", "qp_scope=local"),
    "fedavgm": ("momentum=true", "momentum=2", "momentum=-1", "momentum=abc"),
    "fedadam": ("beta1=true", "beta1=1.5", "tau=-1"),
    "fedprox": ("prox_weight=-1", "prox_weight=true", "prox_weight=none"),
    "scaffold": ("control_update=III", "control_update=1"),
    "fedspeed": ("normalize_perturbation=1", "correction=maybe", "perturbation_radius=-1"),
    "cfedavg": ("error_feedback=2", "compressor=zip", "normalize_by_steps=no"),
    "fafed": ("momentum=true", "momentum=7", "second_moment_decay=2"),
}
ON_FLAGS = [[[flag, value] for value in values] for flag, values in FLAGS.items()]
ON_METHODS = [
    [["--algorithm", method, "--option", option] for option in o] for method, o in METHODS.items()
]
MISTAKES = [
    pytest.param(words, id=" ".join(words[-2:]), marks=pytest.mark.methods if others else ())
    for of_one in ON_FLAGS + ON_METHODS
    for others, words in enumerate(of_one)
]
SMALL = ["--model", "mlp", "--rounds", "1", "--eval-every", "1", "--client-map", "scan"]


def told(capsys, arguments):
    """(exit status, what stderr has) of a run that should not begin."""
    try:
        status = main(["run", *arguments])
    except SystemExit as end:  # the parser of flags ends so
        status = end.code
    return status, capsys.readouterr().err


@pytest.mark.parametrize("arguments", MISTAKES)
def test_a_mistake_is_an_error_without_a_traceback(tmp_path, capsys, arguments):
    directory = tmp_path / "run"
    status, error = told(capsys, [*SMALL, "--run-dir", str(directory), *arguments])
    assert status == 2
    assert error.strip()
    assert "Traceback" not in error
    assert not directory.exists()


NAMED = [  # by the name of the setting, whatever the library calls it
    (["--attack", "label_flip:0.2:5"], "attack is 'label_flip:0.2:5', of 5 classes; digits has 10"),
    (["--attack", "sign_flip:2"], "attack is 'sign_flip:2': share is 2.0"),
    (["--robust-rule", "trimmed_mean:0.5"], "robust_rule is 'trimmed_mean:0.5'"),
    (
        ["--robust-rule", "krum:9"],
        "robust_rule is 'krum:9': rule is 'krum:9', which needs a cohort",
    ),
    (["--secure-bits", "2", "--secure-clip", "1"], "secure_bits is 2: bits is 2; it must be"),
    (["--compressor", "top_k:1.5"], "compressor is 'top_k:1.5'"),
    (["--partition", "dirichlet:0"], "partition is 'dirichlet:0'"),
    (["--concurrency", "12"], "concurrency is 12"),
    (
        ["--dp-clip-norm", "1", "--dp-noise-multiplier", "1", "--dp-noise-bands", "4"],
        "dp_noise_bands is 4",
    ),
    (["--dataset", "csv:no.csv", "--target", "y", "--client", "u"], "dataset is 'csv:no.csv'"),
    (
        ["--dataset", "csv:a.csv", "--target", "y", "--client", "u", "--x", "a", "y"],
        "x has 'y', which is target",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), NAMED, ids=str)
def test_a_mistake_names_the_setting(tmp_path, capsys, arguments, message):
    status, error = told(capsys, [*SMALL, "--run-dir", str(tmp_path / "run"), *arguments])
    assert status == 2
    assert error.startswith(f"fedjax-lab: {message}")


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["--algorithm", "fedprox", "--option", "prox_weight="], "prox_weight of fedprox"),
        (["--algorithm", "gradma", "--option", "memory_size=-"], "memory_size of gradma"),
        (["--model-option", "hidden=8,"], "hidden of the model mlp"),
    ],
)
def test_an_option_beyond_a_float_is_named(words, name, capsys):
    assert main(["run", "--model", "mlp", *words[:-1], f"{words[-1]}1{'0' * 400}"]) == 2
    assert f"{name} is an integer of 401 digits; it is too large." in capsys.readouterr().err


@pytest.mark.parametrize("partition", ["dirichlet:0", "dirichlet", "iid:3", "similarity:101"])
def test_a_wrong_partition_is_not_printed_as_a_setting(partition, capsys):
    assert main(["run", "--partition", partition, "--print-config", "yaml"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"fedjax-lab: partition is {partition!r}")


COMMANDS = [  # FOLDER is an empty one
    *(["sweep"], ["sweep", "--point", "x=1"], ["sweep", "--point", "client_lr=-1"]),
    ["sweep", "--point", "client_lr=nan"],
    ["sweep", "--point", "client_lr=0.1", "--seeds", "1", "1"],
    ["sweep", "--point", "client_lr=0.1", "--seeds", "-1"],
    ["sweep", "--point", "client_lr=0.1", "--out", "FOLDER/none/table.csv"],
    ["sweep", "--point", "client_lr=0.1", "--profile-dir", "FOLDER/run"],
    ["run", "--seeds", "1", "1"],
    *(["export"], ["export", "FOLDER"], ["export", "FOLDER/none", "FOLDER/m.npz"]),
    ["export", "FOLDER", "FOLDER/m.npz"],
    *(["rerun"], ["rerun", "FOLDER"], ["rerun", "FOLDER/none"]),
    *(["report", "FOLDER", "--format", "pdf"], ["report", "FOLDER", "--format", "latex"]),
]


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_a_mistake_of_another_command_is_one_too(tmp_path, capsys, arguments):
    try:
        status = main([word.replace("FOLDER", str(tmp_path)) for word in arguments])
    except SystemExit as end:
        status = end.code
    error = capsys.readouterr().err
    assert status == 2
    assert error.strip()
    assert "Traceback" not in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "command",
    [
        ["sweep", "--point", "client_lr=0.1", "--out"],
        ["tune", "--space", "client_lr=0.1,0.2", "--out"],
        ["tune", "--space", "client_lr=0.1,0.2", "--figure"],
    ],
    ids=" ".join,
)
def test_a_folder_in_place_of_a_file_is_refused_before_the_work(
    command, tmp_path, capsys, monkeypatch
):
    for module in (sweeping, tuning):
        monkeypatch.setattr(module, "start", lambda *_: pytest.fail("it has begun"))
    assert main([*command, str(tmp_path)]) == 2
    assert "a directory; it must be a file" in capsys.readouterr().err


FILES = {
    "twice.yaml": ("rounds: 1\nrounds: 2\n", "'rounds' is given twice"),
    "twice.json": ('{"rounds": 1, "rounds": 2}', "'rounds' is given twice"),
    "octal.yaml": ("rounds: 017\n", "017 is no decimal number"),
    "sexagesimal.yaml": ("rounds: 1:30\n", "1:30 is no decimal number"),
    "sexagesimal_float.yaml": ("client_lr: 1:30.5\n", "1:30.5 is no decimal number"),
    "large.yaml": (f"client_lr: 1{'0' * 400}\n", "client_lr is an integer of 401 digits"),
    "hexadecimal.yaml": ("rounds: 0x10\n", "0x10 is no decimal number"),
    "deep.yaml": ("a: " + "[" * 50 + "]" * 50, "nested too deeply"),
    "deeper.yaml": ("[" * 100_000, "nested too deeply"),
    "deep.json": ("[" * 100_000, "nested too deeply"),
    "nan.json": ('{"client_lr": NaN}', "NaN is no number of JSON"),
    "object.yaml": ("!!python/object/apply:os.system ['true']", "cannot be read as YAML"),
    "list.json": ("[1]", "holds no JSON object"),
    "merge.yaml": ("option: &a {x: 1}\nmodel_option: {<<: *a}\n", "<< merges settings of another"),
    "merge_top.yaml": ("<<: {rounds: 1}\n", "<< merges settings of another place; write them out"),
    "text.yaml": ("just text", "holds no object {setting: value}"),
    "half.json": ('{"rounds": ', "cannot be read as JSON"),
    "tab.yaml": ("rounds:\n\t1", "cannot be read as YAML"),
    "key.yaml": ("1: 2\n", "holds no object {setting: value}"),
    "unknown.yaml": ("round: 2\n", "round is not a setting of a run. Did you mean 'rounds'"),
    "type.yaml": ("rounds: yes\n", "rounds is True; it must be an integer"),
    "option.yaml": ("option: 7\n", "option is 7; it must be"),
    "bytes.json": (b"\xff\xfe\x00", "cannot be read as JSON"),
    "bytes.yaml": (b"\xff\x00\x00", "cannot be read as YAML"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_mistake_in_a_file_names_the_file(tmp_path, capsys, name):
    content, message = FILES[name]
    file = tmp_path / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    status, error = told(capsys, ["--config", str(file), "--run-dir", str(tmp_path / "run")])
    assert status == 2
    assert name in error
    assert message in error
    assert "Traceback" not in error


@pytest.mark.slow
def test_a_number_is_a_tuple_of_one(tmp_path):
    directory = tmp_path / "run"
    flags = [*SMALL, "--run-dir", str(directory), "--model-option", "hidden=32", "--quiet"]
    assert main(["run", *flags]) == 0
    config = json.loads((directory / "config.json").read_text())
    assert config["run_config"]["model_option"]["hidden"] == [32]
