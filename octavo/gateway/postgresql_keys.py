"""Keys in PostgreSQL, by psycopg 3 (the extra `postgresql`). One function in the database counts and refuses requests,
so a batch takes one statement and holds no lock while messages travel. Works behind PgBouncer too: sessions have no
state. A key's row changes in place (fillfactor), without new index entries.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

from octavo.errors import ConfigError, RequestError
from octavo.gateway import key_store
from octavo.gateway.client_keys import LIMITS, name_taken

_MISSING = ""
try:
    import psycopg
    from psycopg.conninfo import conninfo_to_dict
except ImportError as error:  # `PostgresqlKeys` reports it
    _MISSING = str(error)

# The number in the function's name is the version of the whole schema.
_FUNCTION = "octavo_count_2"
_REFUSALS = " ".join(
    f"WHEN own.{per}_{what} >= (own.settings->>'{name}')::numeric "
    f"THEN jsonb_build_array('{name}', own.{per}_{what}, own.settings->'{name}', moment)"
    for name in LIMITS
    for what, _, per in [name.partition("_per_")]
)
_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS octavo_keys (
    id text PRIMARY KEY, digest bytea UNIQUE NOT NULL, settings jsonb NOT NULL,
    number bigint GENERATED ALWAYS AS IDENTITY,
    requests bigint NOT NULL DEFAULT 0, prompt_tokens bigint NOT NULL DEFAULT 0,
    completion_tokens bigint NOT NULL DEFAULT 0,
    minute bigint NOT NULL DEFAULT 0, minute_requests bigint NOT NULL DEFAULT 0,
    minute_tokens bigint NOT NULL DEFAULT 0,
    day bigint NOT NULL DEFAULT 0, day_requests bigint NOT NULL DEFAULT 0, day_tokens bigint NOT NULL DEFAULT 0
) WITH (fillfactor = 50);
CREATE TABLE IF NOT EXISTS octavo_usage (
    key text NOT NULL, day bigint NOT NULL, model text NOT NULL, requests bigint NOT NULL,
    prompt_tokens bigint NOT NULL, completion_tokens bigint NOT NULL, PRIMARY KEY (key, day, model)
) WITH (fillfactor = 50);
CREATE TABLE IF NOT EXISTS octavo_writers (
    id text PRIMARY KEY, batch bigint NOT NULL, answer jsonb, seen timestamptz NOT NULL DEFAULT now()
) WITH (fillfactor = 50);
CREATE OR REPLACE FUNCTION {_FUNCTION}(
    the_writer text, the_batch bigint, the_time double precision, operations jsonb
) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
    moment double precision := coalesce(the_time, extract(epoch FROM clock_timestamp()));
    this_minute bigint := floor(moment / 60);
    this_day bigint := floor(moment / 86400);
    operation jsonb;
    own octavo_keys%ROWTYPE;
    own_requests bigint;
    own_prompt bigint;
    own_completion bigint;
    refusal jsonb;
    answers jsonb := '[]';
BEGIN
    INSERT INTO octavo_writers AS w (id, batch) VALUES (the_writer, the_batch)
        ON CONFLICT (id) DO UPDATE SET batch = excluded.batch, seen = now() WHERE w.batch < excluded.batch;
    IF NOT FOUND THEN
        RETURN (SELECT w.answer FROM octavo_writers AS w WHERE w.id = the_writer);
    END IF;
    FOR operation IN SELECT * FROM jsonb_array_elements(operations) LOOP
        own_requests := (operation->>2)::bigint;
        own_prompt := (operation->>3)::bigint;
        own_completion := (operation->>4)::bigint;
        SELECT * INTO own FROM octavo_keys AS k WHERE k.id = operation->>0 FOR UPDATE;
        IF own.minute <> this_minute THEN
            own.minute_requests := 0;
            own.minute_tokens := 0;
        END IF;
        IF own.day <> this_day THEN
            own.day_requests := 0;
            own.day_tokens := 0;
        END IF;
        refusal := CASE
            WHEN NOT (operation->>5)::boolean THEN NULL
            WHEN own.id IS NULL OR NOT (own.settings->>'is_enabled')::boolean
                OR (own.settings->>'expires_at')::double precision <= moment THEN '[]'::jsonb
            {_REFUSALS}
        END;
        answers := answers || jsonb_build_array(refusal);
        IF refusal IS NULL THEN
            UPDATE octavo_keys AS k SET
                requests = k.requests + own_requests,
                prompt_tokens = k.prompt_tokens + own_prompt,
                completion_tokens = k.completion_tokens + own_completion,
                minute = this_minute,
                minute_requests = greatest(0, own.minute_requests + own_requests),
                minute_tokens = greatest(0, own.minute_tokens + own_prompt + own_completion),
                day = this_day,
                day_requests = greatest(0, own.day_requests + own_requests),
                day_tokens = greatest(0, own.day_tokens + own_prompt + own_completion)
                WHERE k.id = own.id;
            INSERT INTO octavo_usage AS u (key, day, model, requests, prompt_tokens, completion_tokens)
                VALUES (operation->>0, this_day, operation->>1, own_requests, own_prompt, own_completion)
                ON CONFLICT (key, day, model) DO UPDATE SET
                    requests = u.requests + excluded.requests,
                    prompt_tokens = u.prompt_tokens + excluded.prompt_tokens,
                    completion_tokens = u.completion_tokens + excluded.completion_tokens;
        END IF;
    END LOOP;
    UPDATE octavo_writers AS w SET answer = answers WHERE w.id = the_writer;
    RETURN answers;
END $$;
"""
_HAS_SCHEMA = "SELECT to_regprocedure(%s) IS NOT NULL"
_SIGNATURE = f"{_FUNCTION}(text, bigint, double precision, jsonb)"
_CLEAN = "DELETE FROM octavo_writers WHERE seen < now() - interval '7 days' RETURNING id"
_LOCK = 0x6F637461766F  # of the schema, and of names: "octavo"
_HAS_NAME = "SELECT 1 FROM octavo_keys WHERE settings->>'name' = %s AND id <> %s"
_KEY = "SELECT id, settings::text, requests, prompt_tokens, completion_tokens FROM octavo_keys "


class PostgresqlKeys(key_store.KeyDatabase):
    """The database at postgresql://USER:PASSWORD@HOST:PORT/DATABASE, with any parameter that libpq knows."""

    def __init__(self, address: str) -> None:
        """Raises `ConfigError`."""
        if _MISSING:
            raise ConfigError(f"--keys postgresql://... needs psycopg ({_MISSING}): pip install 'psycopg[binary]'.")
        wrong = key_store.wrong_address("PostgreSQL", "postgresql://USER:PASSWORD@HOST:PORT/DATABASE")
        try:
            parts = conninfo_to_dict(address)
        except psycopg.Error:
            raise wrong from None
        if key_store.is_ambiguous(address) or str(parts.get("port", "")).strip("0123456789,"):
            raise wrong
        self.address = f"PostgreSQL at {parts.get('host', 'localhost')}"
        self._conninfo = address
        self._connections: dict[str, psycopg.AsyncConnection[tuple[Any, ...]]] = {}
        self._connecting: dict[str, asyncio.Lock] = {purpose: asyncio.Lock() for purpose in ("count", "find", "admin")}

    async def prepare(self) -> None:
        if not (await self._run(_HAS_SCHEMA, (_SIGNATURE,)))[0][0]:  # a role that may not make the schema can use it
            await self._make_schema()
        with contextlib.suppress(key_store.LostError):  # the role may lack the right
            await self._run(_CLEAN, ())

    async def _make_schema(self) -> None:
        try:
            async with await psycopg.AsyncConnection.connect(self._conninfo) as connection:
                await connection.execute("SELECT pg_advisory_xact_lock(%s)", (_LOCK,))
                await connection.execute(_SCHEMA)
        except psycopg.Error as error:
            raise ConfigError(f"--keys: {self.address} cannot be prepared: {_said(error)}.") from None

    async def close(self) -> None:
        for purpose, connection in list(self._connections.items()):
            await self._drop(purpose, connection)

    async def count(
        self, writer: str, number: int, now: float | None, operations: list[key_store.Operation]
    ) -> list[key_store.Answer]:
        values = (writer, number, now, json.dumps(operations))
        rows = await self._run(f"SELECT {_FUNCTION}(%s, %s, %s, %s::jsonb)", values, "count")
        answers: list[key_store.Answer] = rows[0][0]
        return answers

    async def find(self, digest: bytes) -> key_store.KeyRow | None:
        return next(iter(await self._run(_KEY + "WHERE digest = %s", (digest,), "find")), None)

    async def get(self, key_id: str) -> key_store.KeyRow | None:
        return next(iter(await self._run(_KEY + "WHERE id = %s", (key_id,))), None)

    async def keys(self) -> list[key_store.KeyRow]:
        return await self._run(_KEY + "ORDER BY number", ())

    async def add(self, key_id: str, digest: bytes, settings: str, name: str) -> None:
        # ON CONFLICT: a key that is sent again, as an answer was lost, is added once.
        statement = (
            "INSERT INTO octavo_keys (id, digest, settings) VALUES (%s, %s, %s) ON CONFLICT DO NOTHING RETURNING id"
        )
        await self._run_named(statement, (key_id, digest, settings), key_id, name)

    async def change(self, key_id: str, before: str, settings: str, new_name: str | None = None) -> bool:
        statement = "UPDATE octavo_keys SET settings = %s WHERE id = %s AND settings = %s::jsonb RETURNING id"
        values = settings, key_id, before
        if new_name is None:
            return bool(await self._run(statement, values))
        return bool(await self._run_named(statement, values, key_id, new_name))

    async def delete(self, key_id: str) -> None:
        await self._run("DELETE FROM octavo_keys WHERE id = %s RETURNING id", (key_id,))

    async def used(self, first_day: int, last_day: int) -> list[key_store.UsageRow]:
        statement = (
            "SELECT key, day, model, requests, prompt_tokens, completion_tokens FROM octavo_usage "
            "WHERE day BETWEEN %s AND %s"
        )
        return await self._run(statement, (first_day, last_day))

    async def _run(self, statement: str, values: tuple[Any, ...], purpose: str = "admin") -> list[Any]:
        """Return a statement's rows. Each `purpose` has a connection of its own, so none keeps the others waiting."""
        connection = None
        try:
            async with self._connecting[purpose]:
                connection = self._connections.get(purpose)
                if connection is None or connection.closed:
                    connection = await psycopg.AsyncConnection.connect(
                        self._conninfo, autocommit=True, prepare_threshold=None
                    )
                    self._connections[purpose] = connection
            rows: list[Any] = await (await connection.execute(statement, values)).fetchall()
            return rows
        except (psycopg.DataError, psycopg.IntegrityError) as error:
            raise _unkept(error) from None
        except psycopg.Error as error:
            await self._drop(purpose, connection)
            raise key_store.LostError(_said(error)) from None
        except BaseException:  # an answer that nobody reads may still come
            await self._drop(purpose, connection)
            raise

    async def _run_named(self, statement: str, values: tuple[Any, ...], key_id: str, name: str) -> list[Any]:
        """Return the rows of a statement that gives a key its name, on a connection of its own: of all gateways, one at
        a time looks whether another key has the name. Raises `RequestError` if so."""
        try:
            async with await psycopg.AsyncConnection.connect(self._conninfo, prepare_threshold=None) as connection:
                await connection.execute("SELECT pg_advisory_xact_lock(%s)", (_LOCK,))
                if await (await connection.execute(_HAS_NAME, (name, key_id))).fetchone():
                    raise name_taken(name)
                rows: list[Any] = await (await connection.execute(statement, values)).fetchall()
                return rows
        except (psycopg.DataError, psycopg.IntegrityError) as error:
            raise _unkept(error) from None
        except psycopg.Error as error:
            raise key_store.LostError(_said(error)) from None

    async def _drop(self, purpose: str, connection: psycopg.AsyncConnection[tuple[Any, ...]] | None) -> None:
        """Use a connection no more. Its last statement closes it, as event loops cannot watch a closed socket."""
        if connection is not None:
            if self._connections.get(purpose) is connection:
                del self._connections[purpose]
            if not connection.lock.locked():
                with contextlib.suppress(psycopg.Error):
                    await connection.close()


def _unkept(error: Exception) -> RequestError:
    return RequestError(f"PostgreSQL cannot keep this: {_said(error)}.")


def _said(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
