"""Helpers for error texts of flags: lists of values and names of devices."""

from collections.abc import Iterable


def listed(values: Iterable[object], conjunction: str) -> str:
    *most, last = map(str, values)
    return f"{', '.join(most)} {conjunction} {last}"


def on_device(device: str) -> str:
    return " on CPUs" if device == "cpu" else ""
