"""Studies of GradMA (CVPR 2023)."""
