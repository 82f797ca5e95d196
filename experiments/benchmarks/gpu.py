"""All workloads on a GPU in under eight minutes, nothing downloaded; PyTorch where it is installed.

python -m experiments.benchmarks.gpu [options of experiments.benchmarks]
"""

import sys

from experiments.benchmarks.__main__ import main

if __name__ == "__main__":
    main(["--scale", "gpu", *sys.argv[1:]])
