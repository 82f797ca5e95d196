"""Files of a run: run directories, checkpoints, hashes, compiled programs."""
