"""Hyperparameter search by successive halving, with equal budgets for all methods."""
