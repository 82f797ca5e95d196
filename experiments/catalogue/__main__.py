"""The catalogue's study; see ``experiments.study``."""

from experiments.catalogue import table
from experiments.study import main

STUDIES = (table.STUDY,)

if __name__ == "__main__":
    main(STUDIES)
