"""CFedAvg's studies; see ``experiments.study_command``."""

from experiments.cfedavg import figure_1, figure_2
from experiments.study_command import main

STUDIES = (figure_1.STUDY, figure_2.STUDY)

if __name__ == "__main__":
    main(STUDIES)
