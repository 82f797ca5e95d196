"""Settings of a run, and the command line."""
