"""Classes of logits processors in vLLM's form, for `LLM(logits_processors=[...])`. vLLM keeps one instance for a batch;
here each sequence has an instance, whose batch is this sequence alone, so that rows never move."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, TypeVar

from octavo.errors import RequestError
from octavo.sampling_params import LogitsProcessor as CallerProcessor
from octavo.sampling_params import SamplingParams

RequestLogitsProcessor = Callable[..., Any]  # (output ids, logits) or (prompt ids, output ids, logits) -> logits
T = TypeVar("T")


class MoveDirectionality(Enum):
    """How a row moves in a batch. No batch of Octavo's has moves."""

    UNIDIRECTIONAL = auto()
    SWAP = auto()


@dataclass(frozen=True)
class BatchUpdate:
    """Changes of a batch. `added` has (row, parameters, prompt ids, output ids); the output ids grow with the
    sequence."""

    batch_size: int
    removed: Sequence[int]
    added: Sequence[tuple[int, SamplingParams, list[int] | None, list[int]]]
    moved: Sequence[tuple[int, int, MoveDirectionality]]


class LogitsProcessor(ABC):
    """Changes the logits of a batch [rows, V]. `vllm_config` is the engine's configuration."""

    @classmethod  # noqa: B027 - most classes have no limits
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise `ValueError` for parameters, such as `extra_args`, that the class cannot honour."""

    @abstractmethod
    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None: ...

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Return whether greedy answers stay the same. Octavo applies every processor in any case."""

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Note what has changed since the last step."""

    @abstractmethod
    def apply(self, logits: Any) -> Any:
        """Return the changed logits, which may be the same tensor."""


class AdapterLogitsProcessor(LogitsProcessor):
    """Makes a function for each request, which changes the logits [V] of its row."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        pass

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """Return the function of a request, or None if its logits stay as they are."""

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Not called: the sequence calls the request's function."""

    def apply(self, logits: Any) -> Any:
        return logits


def process_dict_updates(
    entries: dict[int, T],
    batch_update: BatchUpdate | None,
    new_state: Callable[[SamplingParams, list[int] | None, list[int]], T | None],
) -> bool:
    """Keep a state for each row that has one, by the changes of the batch. Returns whether `entries` has changed."""
    before = dict(entries)
    for row in batch_update.removed if batch_update is not None else ():
        entries.pop(row, None)
    for row, params, prompt, output in batch_update.added if batch_update is not None else ():
        entries.pop(row, None)
        if (state := new_state(params, prompt, output)) is not None:
            entries[row] = state
    return entries != before


class PerSequence:
    """Makes a function for each sequence of a request from a class and the request's parameters."""

    def __init__(self, cls: type[LogitsProcessor], config: Any, params: SamplingParams) -> None:
        self._cls, self._config, self._params = cls, config, params

    def __repr__(self) -> str:  # errors name the caller's class
        return self._cls.__qualname__

    def __call__(self, *_: object) -> Any:
        raise AssertionError("a sequence calls what for_sequence returns")

    def for_sequence(self) -> CallerProcessor:
        made = self._cls(self._config, _device(self._config.device), False)
        if isinstance(made, AdapterLogitsProcessor):
            function = made.new_req_logits_processor(self._params)
            return function if function is not None else lambda prompt, output, logits: logits
        seen: list[int] | None = None  # the list that the instance has

        def process(prompt: list[int], output: list[int], logits: Any) -> Any:
            nonlocal seen
            if seen is None:
                seen = output
                made.update_state(BatchUpdate(1, (), ((0, self._params, prompt, seen),), ()))
            elif seen != output:  # forks of a prompt sample several first tokens from the same logits
                seen[:] = output
                made.update_state(None)
            return made.apply(logits[None])[0]

        return process


def with_classes(params: SamplingParams, classes: Sequence[type[LogitsProcessor]], config: Any) -> SamplingParams:
    """Return the parameters of a request with what `classes` make of them. Raises `RequestError` for parameters that a
    class refuses, and for `extra_args` that no class could read."""
    if params.extra_args and not classes:
        raise RequestError(
            "extra_args are read by the classes of LLM(logits_processors=[...]), and there are none; leave them out.",
            param="extra_args",
        )
    found = list(params.logits_processors or ())
    for cls in classes:
        try:
            cls.validate_params(params)
        except ValueError as error:
            raise RequestError(f"{cls.__qualname__}: {error}", param="extra_args") from None
        made = cls(config, _device(config.device), False)
        if not isinstance(made, AdapterLogitsProcessor) or made.new_req_logits_processor(params) is not None:
            found.append(PerSequence(cls, config, params))
    params.logits_processors = found or None
    return params


def check_classes(given: Any) -> list[type[LogitsProcessor]]:
    """Return the classes that `LLM` was given. Raises `TypeError` for anything else."""
    classes: list[Any] = list(given) if isinstance(given, list | tuple) else [given]
    for one in classes:
        if not (isinstance(one, type) and issubclass(one, LogitsProcessor)):
            raise TypeError(
                "logits_processors of LLM must be a list of subclasses of "
                f"octavo.v1.sample.logits_processor.LogitsProcessor, got {one!r:.100}; functions belong to "
                "SamplingParams(logits_processors=[...])."
            )
    return classes


def _device(name: str) -> Any:
    torch = sys.modules.get("torch")  # a class that needs it has imported it
    return name if torch is None else torch.device(name)
