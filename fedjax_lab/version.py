"""The version of the package, for whoever writes it into a file."""

__version__ = "0.4.0.dev0"
