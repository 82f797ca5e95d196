"""A run as a value, and the command line around it."""
