"""The catalogue's study; see ``experiments.studies.command``."""

from experiments.catalogue import table
from experiments.studies.command import main

STUDIES = (table.STUDY,)

if __name__ == "__main__":
    main(STUDIES)
