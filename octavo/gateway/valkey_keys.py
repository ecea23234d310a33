"""Keys in Valkey or Redis, by redis-py (the extra `valkey`). One script in the database counts and refuses requests.
All names begin with `{octavo}:`, and so are at one node of a cluster: `key:ID` has a key, `digests` the ids by digest,
`ids` the ids by age, `usage:DAY` a day's use and `writer:ID` a gateway's last batch.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

from octavo.errors import ConfigError
from octavo.gateway import key_store
from octavo.gateway.client_keys import LIMITS, name_taken
from octavo.gateway.key_store import (
    Answer,
    KeyDatabase,
    KeyRow,
    LateError,
    LostError,
    Operation,
    UsageRow,
    is_ambiguous,
    wrong_address,
)

_MISSING = ""
try:
    from redis.asyncio import BlockingConnectionPool, Redis
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff
    from redis.exceptions import RedisError
    from redis.exceptions import TimeoutError as LateRedisError
except ImportError as error:  # `ValkeyKeys` reports it
    _MISSING = str(error)

logger = logging.getLogger("octavo.gateway")

_PREFIX = "{octavo}:"
_MAX_CONNECTIONS = 16
_TOTALS = ("requests", "prompt_tokens", "completion_tokens")
_COUNT = """
local prefix, writer, batch, moment = KEYS[1], KEYS[1] .. 'writer:' .. ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local before = redis.call('HMGET', writer, 'batch', 'answer')
if before[1] and tonumber(before[1]) >= batch then return before[2] end
if not moment then
    local time = redis.call('TIME')
    moment = tonumber(time[1]) + tonumber(time[2]) / 1e6
end
local function whole(number) return string.format('%.0f', number) end
local windows = {minute = whole(math.floor(moment / 60)), day = whole(math.floor(moment / 86400))}

local function refusal(key, settings)
    if not settings then return '[]' end
    settings = cjson.decode(settings)
    local ends = settings.expires_at
    if not settings.is_enabled or (type(ends) == 'number' and ends <= moment) then return '[]' end
    for name in string.gmatch(ARGV[5], '[^ ]+') do
        local limit, what, per = settings[name], string.match(name, '(.+)_per_(.+)')
        if type(limit) == 'number' then
            local used = tonumber(redis.call('HGET', key, per .. '_' .. what))
            if used >= limit then return cjson.encode({name, used, limit, moment}) end
        end
    end
    return nil
end

local function count(operation)
    local id, model, is_admission = operation[1], operation[2], operation[6]
    local used = {requests = operation[3], prompt_tokens = operation[4], completion_tokens = operation[5]}
    local key = prefix .. 'key:' .. id
    local settings = redis.call('HGET', key, 'settings')
    for window, number in pairs(windows) do
        if settings and redis.call('HGET', key, window) ~= number then
            redis.call('HSET', key, window, number, window .. '_requests', '0', window .. '_tokens', '0')
        end
    end
    local refused = is_admission and refusal(key, settings)
    if not refused then
        for window in pairs(windows) do
            local added = {requests = used.requests, tokens = used.prompt_tokens + used.completion_tokens}
            for what, number in pairs(settings and added or {}) do
                local name = window .. '_' .. what
                -- What is taken back may be of the window before.
                if redis.call('HINCRBY', key, name, whole(number)) < 0 then redis.call('HSET', key, name, '0') end
            end
        end
        for what, number in pairs(used) do
            if settings then redis.call('HINCRBY', key, what, whole(number)) end
            local field = table.concat({id, what, model}, '\\n')
            redis.call('HINCRBY', prefix .. 'usage:' .. windows.day, field, whole(number))
        end
        redis.call('ZADD', prefix .. 'days', windows.day, windows.day)
    end
    return refused
end

-- Written first: where nothing can be written, nothing is counted.
redis.call('HSET', writer, 'batch', whole(batch), 'answer', '[]')
local answers = {}
for place, operation in ipairs(cjson.decode(ARGV[4])) do
    -- Redis takes nothing back: the script goes on after an error, so that a batch is never counted twice.
    local is_counted, answer = pcall(count, operation)
    if not is_counted then answer = cjson.encode(type(answer) == 'table' and answer.err or tostring(answer)) end
    answers[place] = answer or 'null'
end
local answer = '[' .. table.concat(answers, ',') .. ']'
redis.call('HSET', writer, 'batch', whole(batch), 'answer', answer)
redis.call('EXPIRE', writer, 604800)
return answer
"""
_FIND = """
local id = redis.call('HGET', KEYS[1] .. 'digests', ARGV[1])
if not id then return nil end
return {id, unpack(redis.call('HMGET', KEYS[1] .. 'key:' .. id, unpack(ARGV, 2)))}
"""
_IS_TAKEN = """
local prefix, own, name = KEYS[1], ARGV[1], ARGV[2]
local function is_taken()
    for _, id in ipairs(redis.call('ZRANGE', prefix .. 'ids', 0, -1)) do
        local settings = id ~= own and redis.call('HGET', prefix .. 'key:' .. id, 'settings')
        if settings and cjson.decode(settings).name == name then return true end
    end
    return false
end
"""
_ADD = f"""{_IS_TAKEN}
local digest, settings, moment = ARGV[3], ARGV[4], ARGV[5]
if is_taken() then return 'taken' end
local key = prefix .. 'key:' .. own
redis.call('HSET', key, 'digest', digest, 'settings', settings)
for place = 6, #ARGV do redis.call('HSET', key, ARGV[place], 0) end
redis.call('ZADD', prefix .. 'ids', 'NX', moment, own)
redis.call('HSET', prefix .. 'digests', digest, own)
return 'done'
"""
_CHANGE = f"""{_IS_TAKEN}
local before, settings, key = ARGV[3], ARGV[4], prefix .. 'key:' .. own
if redis.call('HGET', key, 'settings') ~= before then return 'changed' end
if name ~= '' and is_taken() then return 'taken' end
redis.call('HSET', key, 'settings', settings)
return 'done'
"""


class ValkeyKeys(KeyDatabase):
    """The database at valkey://USER:PASSWORD@HOST:PORT/NUMBER; valkeys:// for TLS, valkey+unix:///PATH for a socket, or
    the same with redis."""

    def __init__(self, address: str) -> None:
        """Raises `ConfigError`."""
        if _MISSING:
            raise ConfigError(f"--keys valkey://... needs redis-py ({_MISSING}): pip install redis.")
        scheme, _, rest = address.partition("://")
        scheme = {
            "rediss": "rediss", "valkeys": "rediss", "redis+unix": "unix", "valkey+unix": "unix"
        }.get(scheme, "redis")  # fmt: skip
        wrong = wrong_address("Valkey", "valkey://USER:PASSWORD@HOST:PORT/NUMBER")
        if is_ambiguous(address):
            raise wrong
        timeout_s = key_store.TIMEOUT_S
        try:
            parts = urlsplit(address)
            self.address = f"Valkey at {parts.hostname or parts.path}"
            # No retries: `KeyStore` tries again without counting twice.
            pool = BlockingConnectionPool.from_url(
                f"{scheme}://{rest}", max_connections=_MAX_CONNECTIONS, timeout=timeout_s, decode_responses=True,
                socket_timeout=timeout_s, socket_connect_timeout=timeout_s, retry=Retry(NoBackoff(), 0),
            )  # fmt: skip
        except ValueError:
            raise wrong from None
        self._client = Redis(connection_pool=pool)
        scripts = map(self._client.register_script, (_COUNT, _FIND, _ADD, _CHANGE))
        self._count, self._find, self._add, self._change = scripts

    async def prepare(self) -> None:
        async with _lost():
            await self._client.ping()
            try:
                found = {**await self._client.info("memory"), **await self._client.info("persistence")}
            except RedisError:  # the user may not ask for this
                found = {}
        if found.get("maxmemory") and str(found.get("maxmemory_policy")).startswith("allkeys"):
            raise ConfigError(
                f"--keys: {self.address} drops entries that were not used for long, also keys and counts "
                f"(maxmemory-policy {found['maxmemory_policy']}). Set noeviction, or use another database."
            )
        if not found.get("aof_enabled", 1):
            logger.warning(
                "%s has no append-only file: if it dies, counts since its last snapshot are lost", self.address
            )

    async def close(self) -> None:
        await self._client.connection_pool.disconnect(inuse_connections=False)

    async def count(self, writer: str, number: int, now: float | None, operations: list[Operation]) -> list[Answer]:
        moment = "" if now is None else repr(now)
        values = [writer, number, moment, json.dumps(operations), " ".join(LIMITS)]
        async with _lost():
            answers: list[Answer] = json.loads(await self._count(keys=[_PREFIX], args=values))
        return answers

    async def find(self, digest: bytes) -> KeyRow | None:
        async with _lost():
            return _row(await self._find(keys=[_PREFIX], args=[digest.hex(), "settings", *_TOTALS]))

    async def get(self, key_id: str) -> KeyRow | None:
        async with _lost():
            return _row([key_id, *await _read(self._client, key_id)])

    async def keys(self) -> list[KeyRow]:
        async with _lost():
            ids = await self._client.zrange(f"{_PREFIX}ids", 0, -1)
            pipeline = self._client.pipeline(transaction=False)
            for key_id in ids:
                _read(pipeline, key_id)
            rows = [_row([key_id, *row]) for key_id, row in zip(ids, await pipeline.execute(), strict=True)]
        return [row for row in rows if row is not None]

    async def add(self, key_id: str, digest: bytes, settings: str, name: str) -> None:
        async with _lost():
            values = [key_id, name, digest.hex(), settings, time.time(), *_TOTALS]
            done = await self._add(keys=[_PREFIX], args=values)
        if done == "taken":
            raise name_taken(name)

    async def change(self, key_id: str, before: str, settings: str, new_name: str | None = None) -> bool:
        async with _lost():
            done = await self._change(keys=[_PREFIX], args=[key_id, new_name or "", before, settings])
        if done == "taken":
            raise name_taken(new_name or "")
        return bool(done == "done")

    async def delete(self, key_id: str) -> None:
        async with _lost():
            digest = await self._client.hget(f"{_PREFIX}key:{key_id}", "digest")
            pipeline = self._client.pipeline(transaction=True)
            pipeline.hdel(f"{_PREFIX}digests", digest or "")
            pipeline.zrem(f"{_PREFIX}ids", key_id)
            pipeline.delete(f"{_PREFIX}key:{key_id}")
            await pipeline.execute()

    async def used(self, first_day: int, last_day: int) -> list[UsageRow]:
        async with _lost():
            days = await self._client.zrangebyscore(f"{_PREFIX}days", first_day, last_day)
            found = [await self._client.hgetall(f"{_PREFIX}usage:{day}") for day in days]
        rows: dict[tuple[str, int, str], dict[str, int]] = {}
        for day, fields in zip(days, found, strict=True):
            for field, number in fields.items():
                key_id, what, model = field.split("\n", 2)
                rows.setdefault((key_id, int(day), model), {})[what] = int(number)
        return [(*place, *map(used.__getitem__, _TOTALS)) for place, used in rows.items()]  # type: ignore[misc]


def _read(client: Any, key_id: str) -> Awaitable[list[Any]]:
    found: Awaitable[list[Any]] = client.hmget(f"{_PREFIX}key:{key_id}", "settings", *_TOTALS)
    return found


def _row(found: list[Any] | None) -> KeyRow | None:
    """Return id, settings and totals, or None without settings."""
    if found is None or found[1] is None:
        return None
    key_id, settings, requests, prompt_tokens, completion_tokens = found
    return key_id, settings, int(requests), int(prompt_tokens), int(completion_tokens)


@asynccontextmanager
async def _lost() -> AsyncIterator[None]:
    """Make errors of the driver `LostError`."""
    try:
        yield
    except LateRedisError as error:
        raise LateError(str(error)) from None
    except (RedisError, OSError) as error:
        raise LostError(" ".join(str(error).split())[:300] or type(error).__name__) from None
