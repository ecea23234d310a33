"""The version of Octavo, stated only here."""

__version__ = "0.1.0"
__version_tuple__ = tuple(int(part) if part.isdigit() else part for part in __version__.split("."))
