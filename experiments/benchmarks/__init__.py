"""Measurements of time and memory: ratios within one run."""
