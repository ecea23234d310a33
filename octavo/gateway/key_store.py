"""The store of clients' keys: finds keys, admits requests within their limits and counts their use.

Each gateway sends what it has to count in batches, one at a time, and the database decides by its own counts and clock:
all gateways together admit no more than a limit. A batch has its writer and a number. One whose answer was lost is sent
again until there is one, and the database counts it once. `KeyDatabase` is the interface of a database: an SQLite file,
PostgreSQL or Valkey. Only digests of keys are kept. Each request is counted before a replica gets it, and its tokens
before the client gets the end of its answer: a gateway that is killed loses no count.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from octavo.errors import ConfigError, OctavoError, RequestError
from octavo.gateway.client_keys import Key, KeySettings, day_text, digest_of, limit_error, no_key

logger = logging.getLogger("octavo.gateway")

OnLoss = Literal["refuse", "admit"]  # requests that cannot be counted
TIMEOUT_S = 5.0  # for an answer of the database; then requests are refused
_GRACE_S = 0.05  # to read an answer that came while the process had no processor
CLOSE_S = 5.0  # for the last writes when the gateway ends
MIN_BACKOFF_S, MAX_BACKOFF_S = 0.1, 2.0  # between two tries of a database that does not answer
FRESH_S = 1.0  # how old a key's settings may be
_MAX_FOUND = 65_536  # keys that clients have sent, valid or not, and that are remembered
_MAX_BATCH = 256  # requests that one batch admits
_T = TypeVar("_T")
_BY_DAY = itemgetter(1, 0, 2)  # day, key and model of a `UsageRow`

# Key id, settings as JSON, requests, prompt tokens, completion tokens.
KeyRow = tuple[str, str, int, int, int]
# Key id, day from 1970, model, requests, prompt tokens, completion tokens.
UsageRow = tuple[str, int, str, int, int, int]
# Key id, model, requests, prompt tokens, completion tokens, whether it is a request that may be refused.
Operation = tuple[str, str, int, int, int, bool]
# An operation's result: None if it is counted, [limit's name, used, limit, time] if refused, [] for an invalid key.
Verdict = list[Any] | None
Answer = Verdict | str  # a text says why it cannot be counted


class LostError(OctavoError):
    """The database does not answer."""


class LateError(LostError):
    """The database has not answered in time."""


class KeyDatabase(ABC):
    """A database of keys. Methods raise `LostError` if it does not answer, `LateError` if it takes too long; when they
    are called again, they connect again."""

    address: str  # without the password
    is_shared = True  # by several gateways, so that each has only its own use in its metrics

    @abstractmethod
    async def prepare(self) -> None:
        """Make the tables or scripts that the database lacks. Raises `ConfigError` if it cannot be used."""

    @abstractmethod
    async def close(self) -> None:
        """Close the connections; one that waits for an answer is closed when nobody waits for it any more."""

    @abstractmethod
    async def count(self, writer: str, number: int, now: float | None, operations: list[Operation]) -> list[Answer]:
        """Count the operations, each wholly or not at all, at the time `now` (seconds since 1970) or the database's
        own. A batch `number` that the writer has sent before gets the answer of that time and is not counted again. Any
        error other than `LostError` means that nothing was counted."""

    @abstractmethod
    async def find(self, digest: bytes) -> KeyRow | None:
        """Return the key with a digest. Its usage may be given as none."""

    @abstractmethod
    async def get(self, key_id: str) -> KeyRow | None:
        """Return the key with an id."""

    @abstractmethod
    async def keys(self) -> list[KeyRow]:
        """Return all keys, the oldest first."""

    @abstractmethod
    async def add(self, key_id: str, digest: bytes, settings: str, name: str) -> None:
        """Keep a new key. Raises `RequestError` for settings that cannot be kept and for a name that another key
        has."""

    @abstractmethod
    async def change(self, key_id: str, before: str, settings: str, new_name: str | None = None) -> bool:
        """Give a key other settings if its present ones are `before`, as they were read. Returns whether they were.
        Raises `RequestError`, also for a new name that another key has."""

    @abstractmethod
    async def delete(self, key_id: str) -> None:
        """Delete a key; what it has used stays."""

    @abstractmethod
    async def used(self, first_day: int, last_day: int) -> list[UsageRow]:
        """Return the use on these days."""


@dataclass(eq=False)
class _Admission:
    """A request that waits for the database. When it waits no longer, `answer` has an exception or is cancelled."""

    key_id: str
    model: str
    answer: asyncio.Future[Verdict]
    was_admitted: bool = False  # before the database answered


@dataclass
class _Batch:
    """Requests to admit, uses that are counted in any case, and `written`, which is done when all are counted."""

    admissions: list[_Admission] = field(default_factory=list)
    uses: dict[tuple[str, str], tuple[int, int, int]] = field(default_factory=dict)  # by key id and model
    written: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def use(self, key_id: str, model: str, requests: int, prompt_tokens: int, completion_tokens: int) -> None:
        before = self.uses.get((key_id, model), (0, 0, 0))
        self.uses[key_id, model] = before[0] + requests, before[1] + prompt_tokens, before[2] + completion_tokens


class KeyStore:
    """Finds keys by the secret that clients send or by id, and counts their use. Every `async` method raises
    `RequestError` (503) if the database does not answer."""

    def __init__(self, database: KeyDatabase, on_loss: OnLoss, now: Callable[[], float] | None) -> None:
        """`on_loss` says whether requests that cannot be counted are refused. `now` returns the seconds since 1970;
        without it the database's clock says which minute and day it is."""
        self.on_loss, self._now = on_loss, now or time.time
        self._database, self._batch_now = database, now
        self._writer, self._num_batches = secrets.token_hex(8), 0
        self._is_lost = False
        self._has_work, self._is_idle = asyncio.Event(), asyncio.Event()
        self._found: OrderedDict[bytes, tuple[float, Key | None]] = OrderedDict()  # by digest, until a time
        self._finding: dict[bytes, asyncio.Task[Key | None]] = {}
        self._counted: dict[str, Key] = {}

    async def open(self) -> None:
        """Open the database. Raises `ConfigError` if it cannot be used."""
        try:
            await _within(self._database.prepare(), 2 * TIMEOUT_S)
            if not self._database.is_shared:
                self._counted = {row[0]: _key(row) for row in await self._database.keys()}
        except (LostError, msgspec.DecodeError) as error:
            await self._database.close()
            raise ConfigError(
                f"--keys {self._database.address} cannot be used: {_why(self._database, error)}."
            ) from None
        self._next = _Batch()
        self._is_idle.set()
        self._writing = asyncio.ensure_future(self._write())

    async def close(self) -> None:
        """Write the counts that are not written yet, if the database answers, and close it."""
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._is_idle.wait()
        except TimeoutError:
            logger.error("%s does not answer: counts that were not written yet are lost", self._database.address)
        self._writing.cancel()
        await self._database.close()

    async def find(self, secret: bytes) -> Key | None:
        """Return the key with a client's secret, or None."""
        digest = digest_of(secret)
        until, known = self._found.get(digest, (0.0, None))
        if time.monotonic() < until:
            return known
        finding = self._finding.get(digest)
        if finding is None:  # only the first of several requests asks the database
            finding = self._finding[digest] = asyncio.ensure_future(self._look_up(digest))
            finding.add_done_callback(lambda done: self._finding.pop(digest) and (done.cancelled() or done.exception()))
        try:
            return await asyncio.shield(finding)
        except LostError as error:
            if known is not None and self.on_loss == "admit":
                return known
            raise self._refusal(error) from None

    async def get(self, key_id: str) -> Key:
        """Return the key with an id. Raises `RequestError` (404) if there is none."""
        row = await self._ask(lambda: self._database.get(key_id))
        if row is None:
            raise no_key(key_id)
        return _key(row)

    async def keys(self) -> list[Key]:
        """Return all keys, the oldest first."""
        return [_key(row) for row in await self._ask(self._database.keys)]

    def counted(self) -> Iterable[Key]:
        """Return the keys with their use for metrics: only the use through this gateway, if several share the
        database."""
        return self._counted.values()

    async def create(self, settings: KeySettings) -> tuple[Key, str]:
        """Return a new key, and the secret that its client sends."""
        key = Key("key_" + secrets.token_hex(8), settings)
        secret = "sk-octavo-" + secrets.token_urlsafe(32)
        digest = digest_of(secret.encode())
        await self._ask(lambda: self._database.add(key.id, digest, _written(settings), settings.name))
        self._found.pop(digest, None)
        self._count(key, 0, 0, 0)
        return key, secret

    async def change(self, key: Key, settings: KeySettings) -> bool:
        """Give a key these settings. Returns False, and changes nothing, if its settings are no longer `key.settings`.
        Raises `RequestError` (404) if there is no such key."""
        row = await self._ask(lambda: self._database.get(key.id))
        if row is None:
            raise no_key(key.id)
        if _key(row).settings != key.settings:
            return False
        new_name = settings.name if settings.name != key.settings.name else None
        if not await self._ask(lambda: self._database.change(key.id, row[1], _written(settings), new_name)):
            return False
        key.settings = settings
        self._forget(key.id)
        self._count(key, 0, 0, 0)
        return True

    async def delete(self, key: Key) -> None:
        """Delete a key. Its use stays recorded."""
        await self._ask(lambda: self._database.delete(key.id))
        self._forget(key.id)
        self._counted.pop(key.id, None)

    def check(self, key: Key) -> None:
        """Raise `RequestError` for a key that no model may answer."""
        expires_at = key.settings.expires_at
        if not key.settings.is_enabled or (expires_at is not None and self._now() >= expires_at):
            why = "is disabled" if not key.settings.is_enabled else "has expired"
            raise RequestError(f"The API key {key.settings.name} {why}.", status=401, code="invalid_api_key")

    async def usage(self, first_day: int, last_day: int) -> list[dict[str, Any]]:
        """Return the use by day, key and model. Days are counted from 1970."""
        names = {key.id: key.settings.name for key in await self.keys()}
        rows = await self._ask(lambda: self._database.used(first_day, last_day))

        def named() -> list[dict[str, Any]]:
            return [
                {"key": key, "name": names.get(key), "day": day_text(day), "model": model, "requests": requests,
                 "prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
                for key, day, model, requests, prompt_tokens, completion_tokens in sorted(rows, key=_BY_DAY)
            ]  # fmt: skip

        return await asyncio.to_thread(named)  # a thread, as there may be millions of rows

    async def admit(self, key: Key, model: str) -> None:
        """Count a request. Raises `RequestError` (429) if a limit of the key is used up."""
        try:
            answer = await self._admitted(key, model)
        except LostError as error:
            if self.on_loss == "refuse":
                raise self._refusal(error) from None
            answer = None
        if answer is None:
            self._count(key, 1, 0, 0)
        elif answer:
            name, used, limit, now = answer
            raise limit_error(key.settings.name, name, used, limit, now)
        else:
            self._forget(key.id)
            message = f"The API key {key.settings.name} was deleted, is disabled or has expired."
            raise RequestError(message, status=401, code="invalid_api_key")

    async def add_tokens(self, key: Key, model: str, prompt_tokens: int, completion_tokens: int) -> None:
        """Count the tokens of a request. If they cannot be written now, they are written later."""
        self._count(key, 0, prompt_tokens, completion_tokens)
        self._use(key.id, model, 0, prompt_tokens, completion_tokens)
        if not self._is_lost:
            with contextlib.suppress(LostError):
                await asyncio.shield(self._next.written)

    async def _admitted(self, key: Key, model: str) -> Verdict:
        """Return the database's answer to a request. Raises `LostError`."""
        if self._is_lost:
            if self.on_loss == "admit":
                self._use(key.id, model, 1, 0, 0)
            raise LostError("it does not answer")
        admission = _Admission(key.id, model, asyncio.get_running_loop().create_future())
        self._next.admissions.append(admission)
        self._wake()
        return await admission.answer

    async def _write(self) -> None:
        while True:
            await self._has_work.wait()
            batch = self._next
            self._next = _Batch(batch.admissions[_MAX_BATCH:])
            batch.admissions = [one for one in batch.admissions[:_MAX_BATCH] if not one.answer.done()]
            if not self._next.admissions:
                self._has_work.clear()
            answers = await self._counted_by_database(batch)
            for admission, answer in zip(batch.admissions, answers, strict=True):
                self._settle(admission, answer)
            if not batch.written.done():
                batch.written.set_result(None)
            if not self._has_work.is_set():
                self._is_idle.set()

    def _wake(self) -> None:
        self._has_work.set()
        self._is_idle.clear()

    def _use(self, key_id: str, model: str, requests: int, prompt_tokens: int, completion_tokens: int) -> None:
        """Add a use to the next batch."""
        self._next.use(key_id, model, requests, prompt_tokens, completion_tokens)
        self._wake()

    async def _counted_by_database(self, batch: _Batch) -> list[Answer]:
        """Send a batch until it is answered, and return the answers to its admissions."""
        uses: list[Operation] = [(*place, *used, False) for place, used in batch.uses.items()]
        operations = uses + [(one.key_id, one.model, 1, 0, 0, True) for one in batch.admissions]
        # Sorted by key, so that all gateways' batches lock keys in the same order.
        order = sorted(range(len(operations)), key=lambda index: operations[index][0])
        answers = dict(zip(order, await self._answers([operations[index] for index in order], batch), strict=True))
        if self._is_lost:
            self._is_lost = False
            logger.warning("%s answers again, and requests are counted", self._database.address)
        for index, answer in answers.items():
            if isinstance(answer, str):
                key_id, model, *used, _ = operations[index]
                logger.error(
                    "%s cannot count %d requests, %d prompt tokens and %d completion tokens of %s for %s, which are "
                    "left out: %s", self._database.address, *used, key_id, model, answer,
                )  # fmt: skip
        return [answers[len(uses) + index] for index in range(len(batch.admissions))]

    async def _answers(self, operations: list[Operation], batch: _Batch) -> list[Answer]:
        """Send operations of a batch until they are answered, and return the answers. If they cannot be counted
        together, each half is sent alone, so that only faulty operations are left out."""
        self._num_batches += 1
        number, num_failed = self._num_batches, 0
        while True:
            now = None if self._batch_now is None else self._batch_now()
            try:
                count = self._database.count(self._writer, number, now, operations)
                answers = await _within(count, TIMEOUT_S)
                is_whole = len(answers) == len(operations)
                return answers if is_whole else [f"it gave {len(answers)} answers"] * len(operations)
            except LostError as error:
                await self._database.close()
                num_failed += 1
                if num_failed > 1 or isinstance(error, LateError):  # an old connection may fail at once
                    self._lose(error, batch)
                    await asyncio.sleep(min(MIN_BACKOFF_S * 2 ** min(num_failed, 10), MAX_BACKOFF_S))
            except Exception as error:  # the database answered, and has counted nothing
                if len(operations) < 2:
                    return [f"{type(error).__name__}: {error}"] * len(operations)
                half = len(operations) // 2
                first = await self._answers(operations[:half], batch)
                return [*first, *await self._answers(operations[half:], batch)]

    def _lose(self, error: LostError, batch: _Batch | None = None) -> None:
        """Note that the database is lost: end the waiting of all requests, also of those in `batch`."""
        if not self._is_lost:
            logger.error("%s cannot count requests: %s", self._database.address, error)
        self._is_lost = True
        sent = [] if batch is None else [batch]
        for one in [one for each in (*sent, self._next) for one in each.admissions]:
            if not one.answer.done():
                one.was_admitted = self.on_loss == "admit"
                one.answer.set_exception(error)
        for one in self._next.admissions:  # only unsent ones: the sent may be counted already
            if one.was_admitted:
                self._use(one.key_id, one.model, 1, 0, 0)
        self._next.admissions.clear()
        for each in (*sent, self._next):
            if not each.written.done():
                each.written.set_exception(error)
                each.written.exception()
        self._next.written = asyncio.get_running_loop().create_future()

    def _settle(self, admission: _Admission, answer: Answer) -> None:
        """Give a request its answer. If it waits no longer, correct the count instead."""
        is_counted = answer is None
        if isinstance(answer, str):
            if not admission.answer.done():
                admission.answer.set_exception(LostError("it cannot count this request"))
        elif not admission.answer.done():
            admission.answer.set_result(answer)
        elif is_counted != admission.was_admitted:
            self._use(admission.key_id, admission.model, 1 if admission.was_admitted else -1, 0, 0)

    async def _look_up(self, digest: bytes) -> Key | None:
        """Return the key with a digest, from the database. Raises `LostError`."""
        try:
            row = await self._answered(lambda: self._database.find(digest))
        except LostError as error:
            if not self._is_lost:
                self._lose(error)
                self._wake()  # the next batch, even if empty, is sent until it is answered
            raise
        key = None if row is None else _key(row)
        self._found[digest] = time.monotonic() + FRESH_S, key
        self._found.move_to_end(digest)
        if len(self._found) > _MAX_FOUND:
            self._found.popitem(last=False)
        return key

    def _forget(self, key_id: str) -> None:
        for digest in [one for one, (_, key) in self._found.items() if key is not None and key.id == key_id]:
            del self._found[digest]

    async def _ask(self, ask: Callable[[], Awaitable[_T]]) -> _T:
        """Return the database's answer to an admin route. Raises `RequestError`. A read that takes too long for one
        admin does not make the database lost for clients."""
        try:
            return await self._answered(ask)
        except LostError as error:
            raise self._refusal(error) from None

    async def _answered(self, ask: Callable[[], Awaitable[_T]]) -> _T:
        """Return the database's answer. Raises `LostError`, at once if the database is lost already."""
        if self._is_lost:
            raise LostError("it does not answer")
        try:
            return await _within(ask(), TIMEOUT_S)
        except LateError:
            raise
        except LostError:  # an old connection fails at once, a new one may not
            return await _within(ask(), TIMEOUT_S)

    def _count(self, key: Key, requests: int, prompt_tokens: int, completion_tokens: int) -> None:
        counted = self._counted.setdefault(key.id, Key(key.id, key.settings))
        counted.settings = key.settings
        counted.add(requests, prompt_tokens, completion_tokens)

    def _refusal(self, error: LostError) -> RequestError:
        logger.debug("%s: %s", self._database.address, error)
        return RequestError("The gateway cannot count requests now; try again.", status=503, code="keys_unavailable")


def _why(database: KeyDatabase, error: Exception) -> str:
    """Return the reason for which a database cannot be opened. SQLite's own does not name a missing folder."""
    folder = Path(database.address).absolute().parent
    if not database.is_shared and not folder.is_dir():
        return f"there is no folder {folder}"
    return str(error).rstrip(".")


def open_keys(address: str, on_loss: OnLoss = "refuse", now: Callable[[], float] | None = None) -> KeyStore:
    """Return the store at an address: a file, postgresql://... or valkey://.... Without `now` a database uses its own
    clock, so that all gateways agree. Raises `ConfigError`."""
    scheme = address.partition("://")[0] if "://" in address else ""
    if scheme in ("postgresql", "postgres"):
        from octavo.gateway.postgresql_keys import PostgresqlKeys

        return KeyStore(PostgresqlKeys(address), on_loss, now)
    if scheme in ("valkey", "valkeys", "valkey+unix", "redis", "rediss", "redis+unix"):
        from octavo.gateway.valkey_keys import ValkeyKeys

        return KeyStore(ValkeyKeys(address), on_loss, now)
    if scheme:
        raise ConfigError(f"--keys {scheme}://...: a file, postgresql://... or valkey://... is needed.")
    from octavo.gateway.sqlite_keys import SqliteKeys

    return KeyStore(SqliteKeys(address), on_loss, now)


def wrong_address(kind: str, form: str) -> ConfigError:
    """Return the error for an address that cannot be read, without the address or what a driver says: both may have
    the password."""
    return ConfigError(
        f"--keys: the address of {kind} cannot be read: {form} is needed, where characters of USER and PASSWORD other "
        "than letters, digits and -._~ are written as %XX, @ as %40."
    )


def is_ambiguous(address: str) -> bool:
    """Return whether a part of a URL's password may be read as another part, which errors and logs would show."""
    before = address.partition("://")[2].rpartition("@")[0]
    return any(mark in before for mark in "@/?#")


async def _within(work: Awaitable[_T], seconds: float) -> _T:
    """Return the result of `work`. Raises `LostError` if it takes longer than `seconds`. It is then cancelled without
    waiting for its end, as a driver may wait for the server again."""
    task = asyncio.ensure_future(work)
    try:
        for limit_s in (seconds, _GRACE_S):
            if (await asyncio.wait({task}, timeout=limit_s))[0]:
                return task.result()
    except asyncio.CancelledError:
        task.cancel()
        raise
    task.cancel()
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    raise LateError(f"it did not answer within {seconds:g} s")


def _key(row: KeyRow) -> Key:
    key = Key(row[0], msgspec.json.decode(row[1], type=KeySettings))
    key.add(*row[2:])
    return key


def _written(settings: KeySettings) -> str:
    return msgspec.json.encode(settings).decode()
