"""The one place that states the version."""

__version__ = "0.1.0"
__version_tuple__ = tuple(int(part) if part.isdigit() else part for part in __version__.split("."))
