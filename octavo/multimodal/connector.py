"""Fetch media files from the addresses in a request: `http:`, `https:`, and `file:` below one allowed folder.

Addresses come from strangers, and this machine may reach hosts that strangers may not. So a host is resolved once, all
its addresses must be public, and the connection goes to one of these addresses. Each redirect is checked like a new
address. Time, redirects and bytes are bounded during the transfer. Error texts name no address and no file.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import stat
from collections.abc import Sequence
from concurrent.futures import Future
from functools import cached_property, partial
from pathlib import Path
from socket import SOCK_STREAM
from threading import Lock, Thread
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from octavo.config import MediaConfig
from octavo.media_kinds import KINDS

if TYPE_CHECKING:
    import httpx

MAX_CONNECTIONS = 64  # concurrent fetches; others wait, and their timeout starts when they start
_MAX_ADDRESS = 8192  # characters; more than any server takes
_HEADERS = {"Accept-Encoding": "identity", "User-Agent": "octavo"}
_REDIRECTS = (301, 302, 303, 307, 308)


# Networks that `ipaddress.is_global` accepts, in some Python versions at least: entries of IANA's special registries,
# addresses that embed an IPv4 address, and the metadata services of the clouds of Azure and Oracle.
_NOT_PUBLIC = [
    ipaddress.ip_network(network)
    for network in (
        "168.63.129.16/32", "192.0.0.0/24", "192.88.99.0/24", "::/96", "::ffff:0:0/96", "64:ff9b::/96",
        "64:ff9b:1::/48", "100::/64", "2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20", "5f00::/16", "fec0::/10",
    )
]  # fmt: skip


def is_public(address: str) -> bool:
    """Return whether an IP address is on the public internet. Addresses that embed another address are not."""
    found = ipaddress.ip_address(address)
    if any(found in network for network in _NOT_PUBLIC):
        return False
    return found.is_global and not found.is_multicast and not found.is_reserved


class MediaConnector:
    """Fetches media within the bounds of one engine. It has an event loop of its own, in a thread that starts with the
    first fetch."""

    def __init__(self, config: MediaConfig) -> None:
        self._config, self._kind = config, KINDS[config.kind]
        self._refusal = self._kind.refusal
        self._slots = asyncio.Semaphore(MAX_CONNECTIONS)
        self._starting = Lock()

    def fetch(self, url: str) -> Future[bytes]:
        """Start to fetch the file at `url`. The future raises `RequestError`; cancelling it closes the connection."""
        with self._starting:
            loop = self._loop
        return asyncio.run_coroutine_threadsafe(self._fetch(url), loop)

    @cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.new_event_loop()
        Thread(target=loop.run_forever, name="octavo-connector", daemon=True).start()
        return loop

    @cached_property
    def _transport(self) -> httpx.AsyncHTTPTransport:
        import httpx

        # No httpx client: it would keep cookies by address, and share them among hosts with the same address. No proxy
        # of the environment: it would resolve names itself. No kept connections: another host may have opened them.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        return httpx.AsyncHTTPTransport(verify=httpx.create_ssl_context(), trust_env=False, limits=limits)

    async def _fetch(self, url: str) -> bytes:
        import httpx

        if url[:5].lower() == "file:":
            return await asyncio.to_thread(self._read, url)
        if len(url) > _MAX_ADDRESS:
            raise self._refusal(f"its url has more than {_MAX_ADDRESS} characters.")
        limit_s = self._config.fetch_timeout_s
        async with self._slots:
            try:
                async with asyncio.timeout(limit_s):
                    return await self._follow(httpx.URL(url))
            except TimeoutError:
                raise self._refusal(f"it did not arrive within {limit_s:g} s (--media-fetch-timeout).") from None
            except (httpx.InvalidURL, UnicodeError):  # UnicodeError: the name is not valid in IDNA
                raise self._refusal("its url is not a valid address.") from None
            except (httpx.HTTPError, OSError):
                raise self._refusal("its server cannot be reached, or does not answer as it should.") from None

    async def _follow(self, address: httpx.URL) -> bytes:
        for _ in range(self._config.max_redirects + 1):
            self._check(address)
            response = await self._send(address)
            try:
                if response.status_code not in _REDIRECTS or "location" not in response.headers:
                    return await self._body(response)
                address = address.join(response.headers["location"])
            finally:
                await response.aclose()
        raise self._refusal(f"its url redirects more than {self._config.max_redirects} times (--max-media-redirects).")

    def _check(self, address: httpx.URL) -> None:
        if address.scheme not in ("http", "https") or not address.host:
            raise self._refusal("its url must be a data:, http: or https: address, or file: where that is allowed.")
        if address.port is not None and not 0 < address.port < 65536:
            raise self._refusal("its url is not a valid address.")
        if address.userinfo:
            raise self._refusal("its url has a user or a password in it.")
        domains = self._config.allowed_domains
        if domains and address.host.rstrip(".").lower() not in domains:
            raise self._refusal("its url's host is in none of the allowed domains (--allowed-media-domains).")

    async def _send(self, address: httpx.URL) -> httpx.Response:
        """Return the response, without its body, from the first of the host's addresses that can be reached."""
        import httpx

        host, port = address.raw_host.decode("ascii"), address.port or {"http": 80, "https": 443}[address.scheme]
        headers = {**_HEADERS, "Accept": ",".join(self._kind.media_types), "Host": address.netloc.decode("ascii")}
        last: httpx.HTTPError | None = None
        for found in await self._resolve(host, port):
            extensions = {"sni_hostname": host}
            request = httpx.Request("GET", address.copy_with(host=found), headers=headers, extensions=extensions)
            try:
                return await self._transport.handle_async_request(request)
            except (httpx.ConnectError, httpx.ConnectTimeout) as e:
                last = e
        assert last is not None, "names resolve to an address at least"
        try:
            raise last
        finally:
            del last  # its traceback has this function's variables: a cycle

    async def _resolve(self, host: str, port: int) -> list[str]:
        entries = await asyncio.get_running_loop().getaddrinfo(host, port, type=SOCK_STREAM)
        found = list(dict.fromkeys(str(entry[4][0]) for entry in entries))
        if not self._config.allows_private and not all(map(is_public, found)):
            raise self._refusal("its server is not on the public internet (--allow-private-media-addresses).")
        return found

    async def _body(self, response: httpx.Response) -> bytes:
        if response.status_code != 200:
            raise self._refusal(f"its server answered with status {response.status_code}.")
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            raise self._refusal("its server sent it compressed, which was not asked for.")
        limit = self._config.max_bytes
        if int(response.headers.get("content-length", "0")) > limit:  # h11 takes only numbers
            raise self._kind.too_many_bytes(limit)
        body = bytearray()
        async for chunk in response.aiter_raw():
            body += chunk
            if len(body) > limit:
                raise self._kind.too_many_bytes(limit)
        return bytes(body)

    def _read(self, url: str) -> bytes:
        """Return the content of a file: URL. A missing file and a forbidden file get the same error."""
        if self._config.allowed_folder is None:
            raise self._refusal("its url names a file; this server allows none (--allowed-local-media-path).")
        refused = partial(self._refusal, "its url names no readable file below --allowed-local-media-path.")
        try:
            parts = urlsplit(url)
            path = Path(unquote(parts.path)).resolve(strict=True)
            if parts.netloc not in ("", "localhost") or not path.is_relative_to(self._config.allowed_folder):
                raise refused()
            # Opening a pipe would wait for its writer. A link that was put there after `resolve` would lead elsewhere.
            with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), "rb") as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise refused()
                data = file.read(self._config.max_bytes + 1)
        except (OSError, ValueError, RuntimeError):
            raise refused() from None
        if len(data) > self._config.max_bytes:
            raise self._kind.too_many_bytes(self._config.max_bytes)
        return data


def needs_fetching(url: str) -> bool:
    """Return whether a medium's URL is an address to fetch from, and not a data: URL."""
    return url[:5].lower() != "data:"


async def fetch_all(connector: MediaConnector, urls: Sequence[str]) -> dict[str, bytes]:
    """Return the files of the URLs that need fetching, by URL, fetched concurrently. As soon as one is refused, the
    others are cancelled and `RequestError` is raised."""
    futures = {url: connector.fetch(url) for url in dict.fromkeys(urls) if needs_fetching(url)}
    try:
        found = await asyncio.gather(*map(asyncio.wrap_future, futures.values()))
    except BaseException:
        while futures:  # emptied: a future has the error, whose traceback has this function's variables: a cycle
            futures.popitem()[1].cancel()
        raise
    return dict(zip(futures, found, strict=True))
