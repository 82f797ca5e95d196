"""Whole runs: compiled chunks of rounds, evaluation, checkpoints."""
