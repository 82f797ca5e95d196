"""Recipes: one screen each, from data to a few printed lines.

Each runs from the root with ``python -m experiments.recipes.NAME``, in seconds and without a
download. Copy the one that is nearest to what you do.
"""
