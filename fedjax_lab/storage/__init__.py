"""What a run leaves on disk: run directories, checkpoints, hashes, compiled programs."""
