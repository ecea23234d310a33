"""Which servers a server copies blocks from (`--kv-cache-peers`): addresses, or networks in which they come and go.

An address in a network counts only with a proof that its sender knows the servers' key, as a gateway does. Otherwise a
client could name any host of the network, which would then get the key, and could give false blocks.
"""

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Sequence
from urllib.parse import urlsplit

from octavo.errors import ConfigError

BLOCKS_AT = "x-octavo-blocks-at"  # header: the address of the server that has computed the prompt
BLOCKS_PROOF = "x-octavo-blocks-proof"  # header: `address_proof` of this address
_DEFAULT_PORTS = {"http": 80, "https": 443}
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def address_proof(key: str, address: str) -> str:
    """Return the proof that whoever names an address knows the key of the server there."""
    return hmac.new(key.encode(), f"{BLOCKS_AT} {address}".encode(), hashlib.sha256).hexdigest()


def normal_address(address: str) -> str | None:
    """Return the form in which two addresses of a server are compared. Returns None if it is not of the form
    http://HOST:PORT/PATH."""
    if not re.fullmatch(r"https?://[^\s/?#@]+(/[^\s?#]*)?", address, re.IGNORECASE):
        return None
    try:
        parts = urlsplit(address)
        port = parts.port  # raises for one that is no number
    except ValueError:
        return None
    if not parts.hostname or port == 0:
        return None
    return f"{parts.scheme}://{parts.hostname} {port or _DEFAULT_PORTS[parts.scheme]} {parts.path.rstrip('/')}"


class PeerAddresses:
    """The servers of `--kv-cache-peers`."""

    def __init__(self, given: Sequence[str]) -> None:
        """Raises `ConfigError` for a text that is neither http://HOST:PORT/PATH nor NETWORK:PORT."""
        self._addresses: dict[str, str] = {}
        self._networks: list[tuple[_Network, int]] = []
        for text in given:
            if (name := normal_address(text)) is not None:
                self._addresses[name] = text.rstrip("/")
            else:
                self._networks.append(_read_network(text))

    def __bool__(self) -> bool:
        return bool(self._addresses or self._networks)

    @property
    def has_networks(self) -> bool:
        return bool(self._networks)

    def find(self, address: str) -> tuple[str | None, bool]:
        """Return an address as it is to be connected to, None if it is no peer's, and whether it needs a proof."""
        name = normal_address(address)
        if name is None:
            return None, False
        if (known := self._addresses.get(name)) is not None:
            return known, False
        return (address, True) if any(_is_in(address, *one) for one in self._networks) else (None, False)


def _read_network(text: str) -> tuple[_Network, int]:
    found = re.fullmatch(r"\[?([0-9a-fA-F.:]+/[0-9]{1,3})\]?:([0-9]{1,5})", text)
    try:
        if found is None or ("[" in text) != (":" in found[1]):
            raise ValueError("it has another form")
        network, port = ipaddress.ip_network(found[1]), int(found[2])
        if not 0 < port < 65536:
            raise ValueError("the port is not between 1 and 65535")
    except ValueError as error:
        raise ConfigError(
            f"--kv-cache-peers takes addresses such as http://10.0.0.7:8000, and networks such as 10.244.0.0/16:8000 "
            f"or [fd00:10::/64]:8000, got {text}: {error}."
        ) from None
    return network, port


def _is_in(address: str, network: _Network, port: int) -> bool:
    """Return whether a valid address is http://IP:PORT with an IP of the network."""
    parts = urlsplit(address)
    if parts.scheme != "http" or (parts.port or 80) != port or parts.path not in ("", "/"):
        return False
    try:
        return ipaddress.ip_address(parts.hostname or "") in network  # False for the other version of IP
    except ValueError:  # a name
        return False
