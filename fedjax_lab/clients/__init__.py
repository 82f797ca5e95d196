"""What clients do, and how a cohort of them is run."""
