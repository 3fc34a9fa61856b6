"""The one place that knows the version of the package."""

__version__ = "0.1.0"
