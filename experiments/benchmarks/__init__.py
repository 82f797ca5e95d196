"""Measurements of time: ratios within one run."""
