"""FedSpeed's studies; see ``experiments.studies.command``."""

from experiments.fedspeed import (
    duals,
    figure_4_3,
    more_rounds,
    table_4_6,
    tables_4_2_and_4_5,
    tables_4_3_and_4_4,
    tables_4_7_and_4_8,
    tuned_rounds,
)
from experiments.fedspeed.claims import CLAIMS
from experiments.studies.command import main

STUDIES = (
    tables_4_2_and_4_5.STUDY,
    tables_4_3_and_4_4.STUDY,
    table_4_6.STUDY,
    *tables_4_7_and_4_8.STUDIES,
    more_rounds.STUDY,
    tuned_rounds.STUDY,
    figure_4_3.STUDY,
    duals.STUDY,
)

if __name__ == "__main__":
    main(STUDIES, claims=CLAIMS)
