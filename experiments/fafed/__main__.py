"""FAFED's studies; see ``experiments.studies.command``."""

from experiments.fafed import (
    batch,
    cifar10,
    hundred_passes,
    language_model,
    large_batch,
    larger_rates,
    mnist,
    table_2,
)
from experiments.fafed.claims import CLAIMS
from experiments.studies.command import main

STUDIES = (
    table_2.STUDY,
    large_batch.STUDY,
    hundred_passes.STUDY,
    batch.STUDY,
    larger_rates.STUDY,
    mnist.STUDY,
    cifar10.STUDY,
    language_model.STUDY,
)

if __name__ == "__main__":
    language_model.write_text()
    main(STUDIES, claims=CLAIMS)
