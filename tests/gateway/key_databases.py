"""Private servers of the databases that gateways share keys in: in temporary folders, at Unix sockets. Tests that need
one are skipped where its program or its driver is not there (Debian: postgresql, pgbouncer, valkey-server,
redis-server)."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.ports import held_port
from tests.waiting import wait_until, within


class Server:
    """A database's process. `url` leads to an empty database in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(self.command(), stdout=log, stderr=log, **self.options())
        wait_until(self.answers, lambda: (self.folder / "log").read_text()[-2000:])

    def kill(self) -> None:
        """End it as kill -9 does, with the processes that it has for its clients."""
        assert self._process is not None
        children = psutil.Process(self._process.pid).children(recursive=True)
        self.signal(signal.SIGKILL)
        self._process.wait()
        _, alive = psutil.wait_procs(children, timeout=within(60))
        assert not alive

    def signal(self, number: int) -> None:
        """Send a signal to the process, and to those that it has for its clients."""
        assert self._process is not None
        own = psutil.Process(self._process.pid)
        for one in (own, *own.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                one.send_signal(number)

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.signal(signal.SIGCONT)
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait()

    def command(self) -> list[str]:
        raise NotImplementedError

    def options(self) -> dict[str, Any]:
        return {}

    def answers(self) -> bool:
        raise NotImplementedError

    def url(self) -> str:
        raise NotImplementedError


class PostgresqlServer(Server):
    """PostgreSQL refuses to run as root: then it is another user."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._num_databases = 0
        shutil.chown(folder, **self.options())
        options = ["-D", str(folder / "data"), "-A", "trust", "-U", "octavo", "-E", "UTF8", "--no-sync"]
        subprocess.run([_program("initdb"), *options], check=True, capture_output=True, cwd=folder, **self.options())

    def options(self) -> dict[str, Any]:
        if os.getuid():
            return {}
        names = {one.pw_name for one in pwd.getpwall()}
        user = pwd.getpwnam("postgres" if "postgres" in names else "nobody")
        return {"user": user.pw_uid, "group": user.pw_gid}

    def command(self) -> list[str]:
        settings = ["listen_addresses=", "autovacuum=off", "fsync=off", f"unix_socket_directories={self.folder}"]
        words = [word for setting in settings for word in ("-c", setting)]
        return [_program("postgres"), "-D", str(self.folder / "data"), *words]

    def answers(self) -> bool:
        import psycopg

        with contextlib.suppress(psycopg.Error):
            self.execute("SELECT 1")
            return True
        return False

    def execute(self, statement: str) -> None:
        import psycopg

        with psycopg.connect(self.at("postgres"), autocommit=True) as connection:
            connection.execute(statement)  # type: ignore[call-overload]

    def url(self) -> str:
        self._num_databases += 1
        self.execute(f"CREATE DATABASE d{self._num_databases}")
        return self.at(f"d{self._num_databases}")

    def at(self, name: str) -> str:
        return f"postgresql:///{name}?host={self.folder}&user=octavo"


class TlsPostgresqlServer(PostgresqlServer):
    """PostgreSQL at a port, for clients that use TLS."""

    def __init__(self, folder: Path, certificate: tuple[str, str]) -> None:
        super().__init__(folder)
        self.certfile, self._port = certificate[0], held_port()
        for name, file in zip(("cert.pem", "key.pem"), certificate, strict=True):
            shutil.copy(file, folder / name)
            (folder / name).chmod(0o600)
            shutil.chown(folder / name, **self.options())
        hba = (folder / "data" / "pg_hba.conf").read_text().replace("\nhost ", "\nhostssl ")
        (folder / "data" / "pg_hba.conf").write_text(hba)

    def command(self) -> list[str]:
        files = f"ssl_cert_file={self.folder}/cert.pem", f"ssl_key_file={self.folder}/key.pem"
        settings = ["listen_addresses=127.0.0.1", f"port={self._port}", "ssl=on", *files]
        return [*super().command(), *(word for setting in settings for word in ("-c", setting))]

    def at(self, name: str) -> str:
        options = f"sslmode=verify-full&sslrootcert={self.certfile}"
        return f"postgresql://octavo@127.0.0.1:{self._port}/{name}?{options}"


class PgbouncerServer(Server):
    """PgBouncer, which gives each transaction one of two sessions of a PostgreSQL behind it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._postgresql = PostgresqlServer(folder)
        self._postgresql.start()
        (folder / "pgbouncer.ini").write_text(
            f"[databases]\n* = host={folder} user=octavo\n[pgbouncer]\nunix_socket_dir = {folder}\nlisten_addr =\n"
            "listen_port = 6432\nauth_type = any\npool_mode = transaction\ndefault_pool_size = 2\n"
        )

    def close(self) -> None:
        super().close()
        self._postgresql.close()

    def options(self) -> dict[str, Any]:
        return self._postgresql.options()

    def command(self) -> list[str]:
        return [_program("pgbouncer"), str(self.folder / "pgbouncer.ini")]

    def answers(self) -> bool:
        import psycopg

        with contextlib.suppress(psycopg.Error), psycopg.connect(self._behind(self._postgresql.at("postgres"))):
            return True
        return False

    def url(self) -> str:
        return self._behind(self._postgresql.url())

    @staticmethod
    def _behind(url: str) -> str:
        return f"{url}&port=6432"


class ValkeyServer(Server):
    """Valkey, with an append-only file. Redis does as well."""

    program = "valkey-server"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._num_databases = -1

    def command(self) -> list[str]:
        own = ["--port", "0", "--unixsocket", str(self.folder / "socket"), "--dir", str(self.folder)]
        return [_program(self.program), *own, "--appendonly", "yes", "--appendfsync", "no", "--save", ""]

    def answers(self) -> bool:
        import redis

        with contextlib.suppress(redis.RedisError), redis.Redis(unix_socket_path=str(self.folder / "socket")) as client:
            return bool(client.ping())
        return False

    def url(self) -> str:
        self._num_databases += 1
        return f"valkey+unix://{self.folder}/socket?db={self._num_databases}"


class RedisServer(ValkeyServer):
    program = "redis-server"


SERVERS: dict[str, tuple[type[Server], str, str]] = {
    "postgresql": (PostgresqlServer, "postgres", "psycopg"),
    "pgbouncer": (PgbouncerServer, "pgbouncer", "psycopg"),
    "valkey": (ValkeyServer, "valkey-server", "redis"),
    "redis": (RedisServer, "redis-server", "redis"),
}


@contextlib.contextmanager
def server(kind: str, make: Callable[[Path], Server] | None = None) -> Any:
    """A running server, or a skipped test. `make` makes another one with the same programs."""
    usual, program, driver = SERVERS[kind]
    if _find(program) is None or find_spec(driver) is None:
        pytest.skip(f"{program} or Python's {driver} is not installed")
    folder = Path(tempfile.mkdtemp(prefix="octavo-keys-"))  # short, for a socket, and not below a folder of root's own
    running = None
    try:
        running = (make or usual)(folder)
        running.start()
        yield running
    finally:
        if running is not None:
            running.close()
        shutil.rmtree(folder)


def _find(program: str) -> str | None:
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return shutil.which(program) or next((str(one / program) for one in folders if (one / program).exists()), None)


def _program(name: str) -> str:
    found = _find(name)
    assert found is not None
    return found
