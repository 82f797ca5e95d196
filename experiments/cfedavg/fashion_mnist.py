"""CFedAvg's experiments on Fashion-MNIST: compressors and error feedback under label skew.

Paper: Yang et al., MobiHoc 2021, section 5 and Figures 1 to 3, which print no numbers: the CNN
with 582,026 parameters, 100 clients that all take part, 10 local epochs of batch 64, 100 rounds,
client_lr 0.1 and server_lr 1 for all methods, p of 10 classes per client.

Nothing is tuned: the learning rates are the paper's.

    python -m experiments.cfedavg.fashion_mnist
    python -m experiments.cfedavg.fashion_mnist --report
"""

from experiments.study import Method, Scale, Schedule, Study, main, smoke

_LR = {"client_lr": (0.1,)}
_COMPRESSORS = ("top_k:0.9", "top_k:0.99", "random_drop:0.9", "random_drop:0.99")


def _compressed(compressor: str, error_feedback: bool, colour: int) -> Method:
    fixed = {"compressor": compressor, "error_feedback": error_feedback}
    return Method("cfedavg", _LR, fixed=fixed, style=(colour, 0 if error_feedback else 2))


METHODS = {"fedavg": Method("fedavg", _LR, style=(6, 0))}
for _colour, _compressor in enumerate(_COMPRESSORS):
    METHODS[_compressor] = _compressed(_compressor, True, _colour)
    METHODS[f"{_compressor}, no EF"] = _compressed(_compressor, False, _colour)

STUDY = Study(
    name="cfedavg/fashion_mnist",
    title="CFedAvg on Fashion-MNIST: top-k and random dropping, with and without error feedback",
    notes="""\
The paper's experiments on Fashion-MNIST (section 5; its results are figures without printed
numbers, so there is no paper column). As in the paper: full participation, client_lr 0.1,
server_lr 1, batch 64, 100 rounds, p of 10 classes per client, equal sizes. Scaled down to the
machine: 20 clients instead of 100, 10 local steps a round instead of 10 epochs (100 steps), and
an MLP 784-64-10 with 50,890 parameters instead of the CNN with 582,026. `top_k:0.99` sends 1 %
of the coordinates; "no EF" is without error feedback. Nothing is tuned, as in the paper.""",
    partitions=tuple(f"classes_per_client:{p}" for p in (1, 2, 5, 10)),
    methods=METHODS,
    scales={
        "paper": Scale(
            dataset="fashion_mnist",
            model="cnn",
            num_clients=100,
            schedule=Schedule(cohort_size=100, batch_size=64, local_epochs=10),
            rounds=100,
            tuning_rounds=100,
            eval_every=2,
        ),
        "machine": Scale(
            dataset="fashion_mnist",
            model="mlp",
            model_options={"hidden": (64,)},
            num_clients=20,
            schedule=Schedule(cohort_size=20, batch_size=64, local_steps=10),
            rounds=100,
            tuning_rounds=100,
            eval_every=2,
        ),
        "smoke": smoke(10, 10, partitions=("classes_per_client:2",)),
    },
)

if __name__ == "__main__":
    main(STUDY)
