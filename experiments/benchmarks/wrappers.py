"""What a wrapper costs: a round of FedAvg under it next to one without, in one run.

Workloads of ``experiments.benchmarks.workloads`` on noise images, with cohorts of 10 and 100
clients. Both chunks of rounds take turns (A B A B ...) under the planner's client map for the plain
method; every sample waits for the device. The ratio is the median over the pairs, with the range of
the middle half.

    python -m experiments.benchmarks.wrappers [--workloads W1s W3] [--cohorts 10 100]
        [--wrappers W ...] [--rounds 2] [--repeats 5]
"""

import argparse

import numpy as np

from experiments.benchmarks import ours
from experiments.benchmarks.rounds import Rounds
from experiments.benchmarks.workloads import WORKLOADS
from fedjax_lab import with_attack, with_dp, with_robust_aggregation, with_secure_aggregation
from fedjax_lab.data.cohort import Schedule

RULES = (
    "median",
    "trimmed_mean:0.2",
    "krum:2",
    "multi_krum:2:5",
    "geometric_median",
    "norm_clip:1",
)
WRAPPERS = {
    **{rule: lambda a, rule=rule: with_robust_aggregation(a, rule) for rule in RULES},
    "dp": lambda a: with_dp(a, 1.0, 1.0),
    "dp, 10 bands": lambda a: with_dp(a, 1.0, 1.0, noise_bands=10),
    "dp, adaptive": lambda a: with_dp(a, 1.0, 1.0, adaptive_quantile=0.5),
    "secure": lambda a: with_secure_aggregation(a, 32, 1.0),
    "secure, 20 neighbours": lambda a: with_secure_aggregation(a, 32, 1.0, neighbours=20),
    "sign_flip": lambda a: with_attack(a, "sign_flip", share=0.2),
    "alie": lambda a: with_attack(a, "alie", share=0.2),
}


def main(arguments=None):
    """Print one Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    images = [name for name, workload in WORKLOADS.items() if not workload.is_text]
    parser.add_argument("--workloads", nargs="+", choices=images, default=["W1s", "W3"])
    parser.add_argument("--cohorts", type=int, nargs="+", default=[10, 100])
    parser.add_argument("--wrappers", nargs="+", choices=list(WRAPPERS), default=list(WRAPPERS))
    parser.add_argument("--rounds", type=int, default=2, help="of a sample")
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args(arguments)
    print("| workload | cohort | wrapper | time, times plain FedAvg's | middle half |")
    print("|---|---:|---|---:|---:|")
    for name in given.workloads:
        workload = WORKLOADS[name]
        clients, model, params = ours.on_noise(name)
        plain = ours.build_algorithm(workload, model)
        for size in given.cohorts:
            schedule = Schedule(size, workload.batch_size, local_steps=workload.local_steps)
            base = Rounds(plain, params, clients, schedule, given.rounds)
            base.sample()  # the first one warms up
            for wrapper in given.wrappers:
                other = Rounds(
                    *(WRAPPERS[wrapper](plain), params, clients, schedule, given.rounds),
                    client_map=base.client_map,
                )
                other.sample()
                ratios = [other.sample() / base.sample() for _ in range(given.repeats)]
                low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75))
                print(
                    f"| {name} | {size} | {wrapper} | {middle:.2f} | {low:.2f} to {high:.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
