"""Studies, measurements and the demo; run from the root with python -m."""
