"""Notebooks for researchers, as pairs of a Python file and a notebook, and what runs them."""
