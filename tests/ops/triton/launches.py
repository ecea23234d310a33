"""Which variants of kernels an engine launches: when it starts, and later, when a device would have to compile them.

Triton compiles a kernel for each combination of constants, types, and what it is told of numbers and addresses: whether
they are 1, and multiples of 16. In its interpreter nothing is compiled, and `watch` notes what would be. What is
launched follows from sizes that the host knows and from no result, so nothing has to be computed either: whole engines
of many kinds take seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from octavo.execution.worker import Worker
from octavo.ops.triton import launch


class Launches:
    """Variants by `known`, those of the start of any worker so far, and names and differences of the others."""

    def __init__(self) -> None:
        self.known: set[tuple[Any, ...]] = set()
        self.late: dict[tuple[Any, ...], str] = {}
        self.num_starting = 0

    def note(self, kernel: Any, bound: dict[str, Any]) -> None:
        found = variant(kernel, bound)
        if self.num_starting:
            self.known.add(found)
        elif found not in self.known and found not in self.late:
            alike = [other for other in self.known if other[0] == found[0]]
            self.late[found] = f"{found[0]}: " + str(
                min((_differences(found, other) for other in alike), key=len, default="")
            )


def variant(kernel: Any, bound: dict[str, Any]) -> tuple[Any, ...]:
    """The kernel's name, then (name, what it is compiled for) of each argument and option."""
    unspecialized, unaligned = (
        {*(kernel.kwargs.get(name) or ())} for name in ("do_not_specialize", "do_not_specialize_on_alignment")
    )
    parameters = kernel.fn.__annotations__
    found: list[Any] = [kernel.__name__]
    for name, value in bound.items():
        kind: Any
        if name not in kernel.arg_names or "constexpr" in str(parameters.get(name)) or value is None:
            kind = getattr(value, "value", value)
        elif isinstance(value, torch.Tensor):
            kind = value.dtype, name in unaligned or value.data_ptr() % 16 == 0
        elif isinstance(value, bool | float):
            kind = type(value)
        else:
            kind = "int32" if -(1 << 31) <= value < 1 << 31 else "int64"
            if name not in unspecialized:
                kind = kind, value == 1, name in unaligned or value % 16 == 0
        found.append((name, kind))
    return tuple(found)


def _differences(one: tuple[Any, ...], other: tuple[Any, ...]) -> list[Any]:
    there = dict(other[1:])
    return [(name, kind, there.get(name)) for name, kind in one[1:] if kind != there.get(name)]


class _Chance:
    """What comes of kernels that are not run: zeros, and of logits one of a few tokens that no mask hides."""

    _TOKENS = 4  # of which one is chosen, so that what is guessed is right now and then

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)

    def choose(self, logits: torch.Tensor, out: torch.Tensor) -> None:
        preferred = torch.zeros(logits.shape)
        columns = torch.randint(5, 5 + self._TOKENS, (len(logits), 1), generator=self._generator)
        out.copy_((logits.nan_to_num(0.0, 0.0) + preferred.scatter_(1, columns, 1.0)).argmax(1))


class _TorchOfZeros:
    """torch for the modules that launch kernels, where memory that nobody has written is zeros. Nobody else may see it:
    torch keeps lists of its own functions, the first time that somebody asks."""

    empty_like = staticmethod(torch.zeros_like)

    @staticmethod
    def empty(*size: Any, **how: Any) -> torch.Tensor:
        return torch.empty(*size, **how).zero_()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    """Note the launches of all engines meanwhile, in the interpreter, which runs but those that hide tokens."""
    from triton.runtime.interpreter import InterpretedFunction

    launches, chance = Launches(), _Chance()
    run: Callable[..., Any] = InterpretedFunction.run
    start: Callable[..., Any] = Worker.__init__

    def noted(self: Any, *args: Any, grid: Any, warmup: bool, **given: Any) -> None:
        bound = dict(zip(self.arg_names, args, strict=False)) | given
        launches.note(self, bound)
        if launch.outlines.on_launch is not None:  # there is no memory to write to
            return
        if self.__name__ in ("_argmax", "_draw"):
            chance.choose(bound["logits"], bound["out"])
        elif self.__name__ == "_apply_masks":
            run(self, *args, grid=grid, warmup=warmup, **given)

    def started(self: Worker, *args: Any, **given: Any) -> None:
        launches.num_starting += 1
        try:
            start(self, *args, **given)
            self._device.compute.record().wait()  # a device that is late launches only now
        finally:
            launches.num_starting -= 1

    with monkeypatch.context() as patches:
        patches.setattr(InterpretedFunction, "run", noted)
        patches.setattr(Worker, "__init__", started)
        for name, module in list(sys.modules.items()):
            if name.startswith(("octavo.ops.triton", "octavo.ops.cuda")) and getattr(module, "torch", None) is torch:
                patches.setattr(module, "torch", _TorchOfZeros())
        yield launches


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches | None]:
    """Of the test's engines, none of which may launch what the start has not launched."""
    if torch.cuda.is_available():
        yield None
        return
    with watch(monkeypatch) as found:
        yield found
    assert found.known, "no engine has launched anything"
    assert not found.late, "\n".join(found.late.values())
