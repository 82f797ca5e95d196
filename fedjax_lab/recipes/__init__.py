"""Recipes: one screen each, from data to a few printed lines.

Each runs with ``python -m fedjax_lab.recipes.NAME``, in seconds and without a
download. Copy the one that is nearest to what you do.
"""
