"""One file for each opponent, written as its users write it, and one list of what it requires."""
