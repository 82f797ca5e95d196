"""Local training on a client, and the mapping of a cohort's clients to devices."""
