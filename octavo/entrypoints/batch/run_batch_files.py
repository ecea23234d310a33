"""Runs a batch from a file to a file. Answers are appended as they come, and a killed batch continues where it stopped.

Each answer is written in one piece. An incomplete last answer is cut off, and answered lines are skipped. When all
lines have an answer, the answers are put into the order of the input. Memory is bounded: it holds a few bytes for each
line of the input, and the lines being answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from array import array
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.entrypoints.batch.answer_lines import answer_lines
from octavo.entrypoints.batch.batch_lines import CustomIds, checksum, failure, is_success, read_answered, read_custom_id
from octavo.errors import ConfigError
from octavo.file_lock import lock

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from tqdm import tqdm

_LINES_AT_ONCE = 64  # lines read before other tasks may run


class BatchFiles:
    """The input and output of one batch. The output is locked until `close`. Raises `ConfigError`."""

    def __init__(self, input_path: Path, output_path: Path, max_line_bytes: int) -> None:
        self._input_path = input_path
        self._output_path = output_path
        self._max_line_bytes = max_line_bytes
        self._sums = array("L")  # by number: checksums of the input's lines
        self._is_done = bytearray()  # by number: whether the line is answered
        self.num_lines = 0
        self.num_failed = 0  # failed lines among the answered ones
        self._first_failed = b""  # the output line of the first that was found
        try:
            with open(input_path, "rb") as file:
                ids = CustomIds()
                for line in _lines(file, max_line_bytes):
                    self.num_lines += 1
                    self._sums.append(checksum(line))
                    if (repeated := ids.repeated(read_custom_id(line))) is not None:
                        raise ConfigError(f"{input_path}, request {self.num_lines}: {repeated}")
            self._is_done = bytearray(self.num_lines)
            self._output = os.open(output_path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise ConfigError(f"{error.filename} cannot be used: {error.strerror}.") from None
        try:
            self._take_output()
        except BaseException:
            os.close(self._output)
            raise

    @property
    def num_done(self) -> int:
        """Return the number of answered lines."""
        return sum(self._is_done)

    def summary(self) -> str:
        """Return how many lines failed, and why the first of them did."""
        text = f"{self.num_lines} requests, {self.num_failed} of them refused"
        return f"{text}; {failure(self._first_failed)}" if self.num_failed else f"{text}."

    def _count_failed(self, line: bytes) -> None:
        self.num_failed += 1
        self._first_failed = self._first_failed or line

    async def run(self, app: Starlette, *, at_once: int, progress: tqdm[Any]) -> None:
        """Answer the remaining lines. Raises `OSError` if the disk is full; written answers are kept."""

        async def write(number: int, is_good: bool, line: bytes) -> None:
            self._append(line)
            self._is_done[number] = True
            if not is_good:
                self._count_failed(line)
            progress.update()

        await answer_lines(app, self._left(), write, at_once=at_once)
        os.fsync(self._output)

    def put_in_order(self) -> None:
        """Put the answers into the order of their lines, when all lines are answered. Raises `OSError` if the disk is
        full; written answers are kept."""
        begins = array("Q", bytes(8 * self.num_lines))  # by number: where a line's answer begins
        with open(self._output_path, "rb") as file:
            begin = 0
            for line in file:
                found = read_answered(line)
                assert found is not None
                begins[found[0]] = begin
                begin += len(line)
            if all(begins[i] < begins[i + 1] for i in range(len(begins) - 1)):
                return
            path = os.path.realpath(self._output_path)
            ordered = f"{path}.ordering"
            try:
                with open(ordered, "wb") as out:
                    os.chmod(ordered, os.fstat(self._output).st_mode & 0o7777)
                    for begin in begins:
                        file.seek(begin)
                        out.write(file.readline())
                    out.flush()
                    os.fsync(out.fileno())
                os.replace(ordered, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(ordered)
                raise

    def close(self) -> None:
        os.close(self._output)

    async def _left(self) -> AsyncIterator[tuple[int, bytes]]:
        with open(self._input_path, "rb") as file:  # noqa: ASYNC230  # a line at a time, of a local file
            for number, line in enumerate(_lines(file, self._max_line_bytes)):
                if number % _LINES_AT_ONCE == 0:
                    await asyncio.sleep(0)
                if not self._is_done[number]:
                    yield number, line

    def _take_output(self) -> None:
        """Lock the output and find the answered lines."""
        try:
            lock(self._output)
        except OSError:
            raise ConfigError(f"{self._output_path} is being written by another process.") from None
        end = 0
        with open(self._output_path, "rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break  # incomplete
                found = read_answered(line)
                if found is None or found[0] >= self.num_lines:
                    raise ConfigError(
                        f"{self._output_path} is there already and is not the output of {self._input_path}; give "
                        "another output file."
                    )
                number, sum = found
                if sum != self._sums[number]:
                    raise ConfigError(
                        f"line {number + 1} of {self._input_path} has changed since its answer was written to "
                        f"{self._output_path}. Give another output file. To send only changed requests, put them into "
                        "an input file of their own."
                    )
                self._is_done[number] = True
                if not is_success(line):
                    self._count_failed(line)
                end += len(line)
        os.ftruncate(self._output, end)

    def _append(self, line: bytes) -> None:
        end = os.fstat(self._output).st_size
        try:
            written = os.write(self._output, line)
            if written < len(line):
                raise OSError(28, f"{self._output_path} takes no more", str(self._output_path))
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._output, end)
            raise


def _lines(file: object, max_bytes: int) -> Iterator[bytes]:
    """Yield the lines of a file that are not blank; of a line that is too long only the beginning."""
    read = file.readline  # type: ignore[attr-defined]
    while line := read(max_bytes + 1):
        if len(line) > max_bytes and not line.endswith(b"\n"):
            yield line[:1024]
            while (rest := read(max_bytes)) and not rest.endswith(b"\n"):
                pass
        elif line.strip():
            yield line if line.endswith(b"\n") else line + b"\n"
