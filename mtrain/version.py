"""The version of mtrain."""

__version__ = "0.1.0"
