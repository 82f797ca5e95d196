"""GradMA's studies; see ``experiments.studies.command``."""

from experiments.gradma import all_baselines, figure_5, figures_6_and_7, tables_1_and_2
from experiments.gradma.claims import CLAIMS
from experiments.studies.command import main

STUDIES = (all_baselines.STUDY, tables_1_and_2.STUDY, figures_6_and_7.STUDY, figure_5.STUDY)

if __name__ == "__main__":
    main(STUDIES, claims=CLAIMS)
