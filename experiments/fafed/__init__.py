"""Studies of FAFED (AAAI 2023)."""
