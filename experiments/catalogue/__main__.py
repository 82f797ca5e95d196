"""The catalogue's study; see ``experiments.study_command``."""

from experiments.catalogue import table
from experiments.study_command import main

STUDIES = (table.STUDY,)

if __name__ == "__main__":
    main(STUDIES)
