"""The secret that the nodes of a group share, from the environment."""

import ipaddress
import os

from octavo.errors import ConfigError

TOKEN_VARIABLE = "OCTAVO_NODES_TOKEN"


def group_token() -> bytes:
    """Return the token from the environment; empty if there is none."""
    return os.environ.get(TOKEN_VARIABLE, "").encode()


def check_token(address: str, flag: str) -> None:
    """Raise `ConfigError` if there is no token and other hosts can reach the address."""
    try:
        is_local = ipaddress.ip_address(address).is_loopback
    except ValueError:
        is_local = address == "localhost"
    if not is_local and not group_token():
        raise ConfigError(
            f"{flag} {address} is in a network: set {TOKEN_VARIABLE} to the same secret on all nodes, so "
            "that nobody else can join them."
        )
