"""The study of accuracy against epsilon."""
