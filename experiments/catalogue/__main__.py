"""The catalogue's studies; see ``experiments.studies.command``."""

from experiments.catalogue import personal, stale_controls
from experiments.studies.command import main

STUDIES = (stale_controls.STUDY, personal.STUDY)

if __name__ == "__main__":
    main(STUDIES)
