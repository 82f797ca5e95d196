"""FedSWA's studies; see ``experiments.studies.command``."""

from experiments.fedswa import (
    figure_5,
    figures_1_and_4,
    larger_rates,
    more_rounds,
    table_4,
    table_4_rates,
    table_5,
    table_8,
    tables_2_3_and_6,
)
from experiments.fedswa.claims import CLAIMS
from experiments.studies.command import main

STUDIES = (
    tables_2_3_and_6.STUDY,
    table_4.STUDY,
    table_4_rates.STUDY,
    table_5.STUDY,
    table_8.STUDY,
    *figure_5.STUDIES,
    figures_1_and_4.STUDY,
    more_rounds.STUDY,
    larger_rates.STUDY,
)

if __name__ == "__main__":
    main(STUDIES, claims=CLAIMS)
