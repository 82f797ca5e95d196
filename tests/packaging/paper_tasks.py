"""Ten tasks on the way from a question to a table, with the installed package alone.

    python tests/packaging/paper_tasks.py            all, with the Python that runs this
    python tests/packaging/paper_tasks.py grid cifar some of them

As in ten_tasks.py; each program checks its own numbers, by another computation where there is one.
`torch` needs PyTorch, which the package does not, and is left out without it.
"""

import importlib.util
import sys

from ten_tasks import LAB, Task, main

# What the programs share: lines that a reader of README.md has already.
SETUP = """
import jax, numpy as np
from fedjax_lab import algorithms, build_round, data, load_run, models, simulate
train, test = data.load("digits")
clients = data.partition(train, "dirichlet:0.1", num_clients=20, seed=0)
model, prepare = models.linear(10), data.preprocess(scale=16)
params = model.init(jax.random.key(0), train.x[:1])
loss_fn = models.classification_loss(model.apply, prepare)
schedule = dict(cohort_size=5, local_steps=5, batch_size=16)
"""

# All clients' models by hand, from the saved run: the order of two methods.
PERSONAL = """
import json, pathlib
scores = {}
for name in ("fedavg", "fedrep"):
    file, = pathlib.Path("runs").glob(f"**/{name}*/summary.json")
    scores[name] = np.mean(json.loads(file.read_text())["client_test_accuracy"])
best = next(line for line in open("out.csv") if line.startswith(("fedavg", "fedrep")))
print("ranked by the clients' models:", best.startswith(max(scores, key=scores.get)))
"""

RECORD = """
import json, optax
for factor in (0.998, 0.9):
    rate = optax.exponential_decay(0.1, 1, factor)
    fedavg = algorithms.fedavg(loss_fn, client_lr=rate)
    simulate(fedavg, params, clients, rounds=2, run_dir=f"runs/{factor}", **schedule)
records = [open(f"runs/{factor}/config.json").read() for factor in (0.998, 0.9)]
print("the factor is recorded:", "0.998" in records[0] and "0.998" not in records[1])
"""

COSINES = """
from fedjax_lab import with_update_metrics
for make in (algorithms.gradma, algorithms.scaffold):
    more = {"memory_size": 20} if make is algorithms.gradma else {}
    measured = with_update_metrics(make(loss_fn, client_lr=0.1, **more), per_client=True)
    state, key = measured.init(params, num_clients=20), jax.random.key(0)
    batch = data.draw_batch(clients, key, 0, **schedule)
    _, metrics = build_round(measured)(state, batch)
    plain = build_round(make(loss_fn, client_lr=0.1, **more))
    flat = lambda p: np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(p)])
    each = np.zeros((5, flat(params).size))
    for i in range(5):  # the first round of one client alone is its update
        keep = np.arange(5) == i
        fresh = measured.init(params, num_clients=20)
        alone, _ = plain(fresh, batch._replace(participates=keep))
        each[i] = flat(params) - flat(measured.params(alone))
    mean = each.mean(0)
    cosines = each @ mean / np.linalg.norm(each, axis=1) / np.linalg.norm(mean)
    assert np.allclose(cosines, metrics["per_client/update_cosine"], atol=1e-4), make
print("cosines as by NumPy")
"""

EPOCHS = """
epochs = np.where(np.asarray(clients.sizes) < 50, 4, 1)
steps = np.ceil(np.asarray(clients.sizes) / 16) * epochs
fedavg = algorithms.fedavg(loss_fn, client_lr=0.1)
schedule = dict(cohort_size=20, local_epochs=epochs, batch_size=16)
run = simulate(fedavg, params, clients, rounds=1, **schedule)
print("local steps as by hand:", np.isclose(run.history[0]["local_steps"], steps.mean()))
"""

FEDLC = """
import optax
margin = 0.5 * np.maximum(clients.label_histogram(), 1.0) ** -0.25
def calibrated(params, examples, key, constants):
    logits = model.apply(params, prepare(examples, key).x, key) - constants["margin"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, examples.y)
fedlc = algorithms.fedavg(calibrated, client_lr=0.1)
run = simulate(fedlc, params, clients, rounds=10, client_constants={"margin": margin}, **schedule)
print("FedLC's loss:", run.history[-1]["loss"])
"""

CIFAR = """
import io, pickle, tarfile
rng = np.random.default_rng(0)
with tarfile.open("cifar-10-python.tar.gz", "w:gz") as archive:
    for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
        labels, images = (np.arange(40) % 10).tolist(), rng.integers(0, 256, (40, 3072), np.uint8)
        rows = {b"data": images, b"labels": labels}
        text = pickle.dumps(rows, protocol=2)
        entry = tarfile.TarInfo(f"cifar-10-batches-py/{name}"); entry.size = len(text)
        archive.addfile(entry, io.BytesIO(text))
    names = pickle.dumps({b"label_names": [str(i).encode() for i in range(10)]}, protocol=2)
    entry = tarfile.TarInfo("cifar-10-batches-py/batches.meta"); entry.size = len(names)
    archive.addfile(entry, io.BytesIO(names))
"""

TORCH = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = torch.nn.Conv2d(1, 32, 5), torch.nn.Conv2d(32, 64, 5)
        self.fc1, self.fc2 = torch.nn.Linear(1024, 512), torch.nn.Linear(512, 10)
    def forward(self, x):
        for conv in (self.conv1, self.conv2):
            x = torch.nn.functional.max_pool2d(torch.relu(conv(x)), 2)
        return self.fc2(torch.relu(self.fc1(x.flatten(1))))
net, cnn = Net(), models.cnn()
x = np.random.default_rng(0).normal(size=(40, 28, 28, 1)).astype(np.float32)
shapes = jax.eval_shape(cnn.init, jax.random.key(0), x)
own = models.load_state_dict(net.state_dict(), shapes)
people = data.partition(data.Examples(x, np.arange(40) % 10), "iid", num_clients=4)
fedavg = algorithms.fedavg(models.classification_loss(cnn.apply), client_lr=0.01)
run = simulate(fedavg, own, people, rounds=2, cohort_size=2, local_steps=2, batch_size=8)
state = models.to_state_dict(run.params)
net.load_state_dict({name: torch.tensor(np.asarray(leaf)) for name, leaf in state.items()})
logits = net(torch.tensor(x).permute(0, 3, 1, 2)).detach().numpy()
print("the same logits in PyTorch:", np.allclose(logits, cnn.apply(run.params, x), atol=1e-4))
"""

LOOP = """
fedavg = algorithms.fedavg(loss_fn, client_lr=0.1)
state, key, round_fn = fedavg.init(params, num_clients=20), jax.random.key(0), build_round(fedavg)
for t in range(10):
    state, metrics = round_fn(state, data.draw_batch(clients, key, t, **schedule))
run = simulate(fedavg, params, clients, rounds=10, seed=0, **schedule)
same = jax.tree.map(lambda a, b: np.allclose(a, b, atol=1e-6), fedavg.params(state), run.params)
print("the loop of simulate:", all(jax.tree.leaves(same)))
"""

SHORT = "--rounds 10 --eval-every 5"
TASKS = {
    "grid": Task(
        "methods and partitions over seeds, as a LaTeX table",
        (
            f"{LAB} run --algorithm fedavg scaffold --partition dirichlet:0.1 dirichlet:1 "
            f"--seeds 0 1 --run-dir grid {SHORT}",
            f"{LAB} report grid --rows method --columns partition --format latex",
        ),
        "\\toprule",
    ),
    "personal": Task(
        "a personalised comparison, whose order is by the clients' own models",
        (
            f"{LAB} run --algorithm fedavg fedrep --partition classes_per_client:2 {SHORT}",
            f"{LAB} report runs --format csv > out.csv",
            "python personal.py",
        ),
        "ranked by the clients' models: True",
        {"personal.py": "import numpy as np" + PERSONAL},
        at_most=12,
    ),
    "record": Task(
        "two Python runs that differ in a factor, told apart by their records",
        ("python record.py",),
        "the factor is recorded: True",
        {"record.py": SETUP + RECORD},
        at_most=16,
    ),
    "cosines": Task(
        "cosines of GradMA's and SCAFFOLD's updates",
        ("python cosines.py",),
        "cosines as by NumPy",
        {"cosines.py": SETUP + COSINES},
        at_most=30,
    ),
    "epochs": Task(
        "a number of epochs for each client",
        ("python epochs.py",),
        "local steps as by hand: True",
        {"epochs.py": SETUP + EPOCHS},
        at_most=16,
    ),
    "constants": Task(
        "FedLC, whose loss reads the frequencies of a client's classes",
        ("python fedlc.py",),
        "FedLC's loss: ",
        {"fedlc.py": SETUP + FEDLC},
        at_most=18,
    ),
    "cifar": Task(
        "the archive that CIFAR-10's page offers",
        (
            "python archive.py",
            f"{LAB} run --dataset cifar10:cifar-10-python.tar.gz --model linear --rounds 2 "
            "--num-clients 10 --cohort-size 2 --local-steps 2",
        ),
        "accuracy",
        {"archive.py": "import numpy as np" + CIFAR},
        at_most=18,
    ),
    "torch": Task(
        "a CNN of PyTorch, in and out",
        ("python net.py",),
        "the same logits in PyTorch: True",
        {"net.py": SETUP + TORCH},
        at_most=32,
    ),
    "loop": Task(
        "a loop of one's own",
        ("python loop.py",),
        "the loop of simulate: True",
        {"loop.py": SETUP + LOOP},
        at_most=17,
    ),
    "decay": Task(
        "a decayed learning rate, seen in the rows",
        (
            f"{LAB} run --client-lr 0.1 --client-lr-schedule step:5:0.1 --run-dir decay {SHORT}",
            "tail -n 1 decay/metrics.jsonl",
        ),
        '"client_lr": 0.01',
    ),
}

if __name__ == "__main__":
    has_torch = importlib.util.find_spec("torch") is not None
    main(sys.argv[1:] or [name for name in TASKS if name != "torch" or has_torch], tasks=TASKS)
