"""The catalogue's study; see ``experiments.studies.command``."""

from experiments.catalogue import personal, stale_controls, table
from experiments.studies.command import main

STUDIES = (table.STUDY, stale_controls.STUDY, personal.STUDY)

if __name__ == "__main__":
    main(STUDIES)
