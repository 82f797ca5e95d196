"""Recipes: what a user would write, one screen each."""
