"""Robust rules under attacks: which of them holds what, and when."""
