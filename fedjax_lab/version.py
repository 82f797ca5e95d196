"""The version of the package."""

__version__ = "0.5.0.dev0"
