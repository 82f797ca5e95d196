"""Recipes: one screen each, from data to a few printed lines.

Each runs with ``python -m fedjax_lab.recipes.NAME``, takes seconds and downloads nothing. Copy the
one that is closest to your task.
"""
