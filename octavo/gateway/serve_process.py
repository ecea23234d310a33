"""`octavo serve` as a child of the gateway: on a port that the kernel gives, with a key that only the gateway knows."""

import asyncio
import contextlib
import logging
import os
import re
import secrets
import signal
import time
from collections.abc import Sequence
from typing import Any, Protocol, Self

import msgspec

from octavo.errors import OctavoError
from octavo.gateway.catalogue import ModelEntry
from octavo.processes import server_command

logger = logging.getLogger("octavo.gateway")

STOP_TIMEOUT_S = 30.0  # from SIGTERM to SIGKILL: longer than a server drains and saves its cache
_MAX_LINE_BYTES = 1 << 20
_MAX_ERROR_CHARACTERS = 2000  # of an error of several lines, before its last one
# Processor time that shows progress, in seconds or as a share of the time that a start may take without progress: less
# is what timers of a server that hangs take.
_SIGN_S, _SIGN_SHARE = 1.0, 0.01
_NUM_LOOKS = 20  # at the processor time, in the time that a start may take without progress
_LOOK_S = 0.5  # between two looks, at least
_OWN_KEYS = ("OCTAVO_API_KEY", "VLLM_API_KEY", "OCTAVO_ADMIN_KEY")  # variables that servers do not get


class StartError(OctavoError):
    """A model that did not start; the message is the child's own error line. `may_pass` is whether the next start may
    succeed though nobody changes anything."""

    def __init__(self, message: str, *, may_pass: bool = True) -> None:
        super().__init__(message)
        self.may_pass = may_pass


class RunningServer(Protocol):
    """A server that was started. `exited` is done when its process has ended."""

    address: str
    api_key: str | None
    exited: asyncio.Future[None]

    async def stop(self) -> None: ...
    def kill(self) -> None: ...


class ServeProcess:
    """One `octavo serve`, ready to answer."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, api_key: str) -> None:
        self.address = ""
        self.api_key: str | None = api_key
        self.exited: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._name, self._process = name, process
        self._ready = asyncio.Event()
        self._error_line = ""
        self._heard_at = time.monotonic()  # when the last line came
        self._has_refused = False  # with a reason that its user can mend
        self._reading = asyncio.ensure_future(self._read_log())

    @classmethod
    async def start(cls, name: str, entry: ModelEntry, more_words: Sequence[str] = ()) -> Self:
        """Return when the server is ready. `more_words` are further flags of `octavo serve`. Raises `StartError`;
        cancelled, it ends the process first."""
        api_key = secrets.token_urlsafe(32)
        words = ["serve", entry.model or name, "--host", "127.0.0.1", "--port", "0"]
        words += ["--served-model-name", name, *entry.aliases]  # lines of batches may have aliases
        words += ["--log-format", "json", *entry.flag_words(), *more_words]
        environment = {key: value for key, value in os.environ.items() if key not in _OWN_KEYS}
        try:
            process = await asyncio.create_subprocess_exec(
                *server_command("octavo.entrypoints.cli.main", *words),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                limit=_MAX_LINE_BYTES,
                start_new_session=True,  # the gateway decides when its servers stop, not a Ctrl-C of the terminal
                env={**environment, "OCTAVO_API_KEY": api_key},
            )
        except (OSError, ValueError) as error:  # ValueError: a flag has a character that no command line can have
            raise StartError(f"octavo serve cannot be run: {error}", may_pass=isinstance(error, OSError)) from None
        server = cls(name, process, api_key)
        try:
            await server._until_ready(entry.start_timeout)
        except asyncio.CancelledError:
            await server.stop()
            raise
        if not server.address:
            why = server._error_line or f"octavo serve ended with exit code {process.returncode}"
            raise StartError(why, may_pass=not server._has_refused)
        return server

    async def _until_ready(self, timeout_s: float | None) -> None:
        """Return when the server is ready or has ended. Raises `StartError`, and ends it, if it makes no progress for
        `timeout_s`: it writes no line, and its processes compute nothing."""
        is_ready = asyncio.ensure_future(self._ready.wait())
        events: set[asyncio.Future[Any]] = {is_ready, self.exited}
        work_s, progress_at = 0.0, time.monotonic()
        try:
            while True:
                look_s = None if timeout_s is None else max(_LOOK_S, timeout_s / _NUM_LOOKS)
                done, _ = await asyncio.wait(events, timeout=look_s, return_when=asyncio.FIRST_COMPLETED)
                if done or timeout_s is None:
                    return
                before, work_s = work_s, await asyncio.to_thread(_work_s, self._process.pid)
                if abs(work_s - before) >= max(_SIGN_S, _SIGN_SHARE * timeout_s):  # less if a process has ended
                    progress_at = time.monotonic()
                else:
                    work_s = before
                if time.monotonic() - max(progress_at, self._heard_at) >= timeout_s:
                    break
        finally:
            is_ready.cancel()
        self.kill()
        await asyncio.wait({self.exited})
        raise StartError(f"octavo serve made no progress for {timeout_s:g} s (start_timeout) and was killed.")

    async def stop(self) -> None:
        """Have the server drain, and return when its process has ended."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        done, _ = await asyncio.wait({self.exited}, timeout=STOP_TIMEOUT_S)
        if not done:
            logger.warning("%s did not stop within %g s and is killed", self._name, STOP_TIMEOUT_S)
            self.kill()
            await asyncio.wait({self.exited})

    def kill(self) -> None:
        """End the server and the processes that it has started, whatever state they are in."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def _read_log(self) -> None:
        assert self._process.stdout is not None
        while True:
            try:
                line = await self._process.stdout.readline()
            except ValueError:  # the line is longer than the limit; its rest is read as another line
                continue
            if not line:
                break
            self._note(line.decode("utf-8", "replace").rstrip())
        await self._process.wait()
        self.exited.set_result(None)

    def _note(self, line: str) -> None:
        """Log a line of the child's. Note the address if it says that the server is ready, or the error."""
        self._heard_at = time.monotonic()
        try:
            record: Any = msgspec.json.decode(line)
            message, level = str(record["message"]), logging.getLevelNamesMapping().get(record["level"], logging.INFO)
        except (msgspec.DecodeError, KeyError, TypeError):  # no JSON: errors of argparse come before logging is set up
            message, level, record = line, logging.INFO, {}
        if level >= logging.CRITICAL or re.match(r"octavo.*: error: ", message):
            self._error_line, self._has_refused = message, True
            if not self.address:
                return  # `StartError` has it, and its handler logs it
        elif self._has_refused and not self.address and not record:
            if (further := message.strip()) and len(self._error_line) < _MAX_ERROR_CHARACTERS:
                self._error_line += f"; {further[:_MAX_ERROR_CHARACTERS]}"  # a line of the error
            return
        elif not self.address and not record and message.strip():
            self._error_line = message  # the last line of a traceback
        logger.log(level, "%s: %s", self._name, message)
        if "ready" in record:
            self.address = str(record["ready"]["API"]).removesuffix("/v1")
            self._ready.set()


def _work_s(pid: int) -> float:
    """Return the processor time that a process and those that it has started have taken."""
    import psutil

    work_s = 0.0
    with contextlib.suppress(psutil.Error):
        parent = psutil.Process(pid)
        for process in (parent, *parent.children(recursive=True)):
            with contextlib.suppress(psutil.Error):  # it has ended since
                times = process.cpu_times()
                work_s += times.user + times.system
    return work_s
