"""CFedAvg's studies; see ``experiments.studies.command``."""

from experiments.cfedavg import figure_1, figure_2
from experiments.cfedavg.claims import CLAIMS
from experiments.studies.command import main

STUDIES = (figure_1.STUDY, figure_2.STUDY)

if __name__ == "__main__":
    main(STUDIES, claims=CLAIMS)
