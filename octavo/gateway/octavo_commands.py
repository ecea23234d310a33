"""Runs `octavo show`, `pull` and `rm` as child processes, as the gateway itself imports nothing that reads models."""

import asyncio
import contextlib
import json
import logging
import os
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from octavo.errors import OctavoError
from octavo.gateway.deployment import Deployment
from octavo.ollama.cards import Card, of_adapter
from octavo.processes import server_command

logger = logging.getLogger("octavo.gateway")

_FAILED_S = 5.0  # until a card that could not be made is tried again
_MAX_LINE_BYTES = 16 << 20  # a card has the model's chat template


async def run_octavo(*words: str, offline: bool = False) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the JSON objects that a command prints, one a line. Closing the generator ends the command. Raises
    `OctavoError` with the command's own error line."""
    environment = os.environ | ({"HF_HUB_OFFLINE": "1"} if offline else {})
    process = await asyncio.create_subprocess_exec(
        *server_command("octavo.entrypoints.cli.main", *words),
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        limit=_MAX_LINE_BYTES, env=environment,
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    errors = asyncio.ensure_future(process.stderr.read())
    try:
        async for line in process.stdout:
            yield json.loads(line)
        said = (await errors).decode(errors="replace").strip().splitlines()
        if await process.wait():
            why = said[-1] if said else f"octavo {words[0]} ended with exit code {process.returncode}"
            raise OctavoError(why.removeprefix("octavo: error: "))
    finally:
        errors.cancel()
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


class ModelCards:
    """Cards of models, by the path or id that `octavo serve` gets. A card is made once; files of another version have
    another path."""

    def __init__(self) -> None:
        self._cards: dict[str, dict[str, Any]] = {}
        self._making: dict[str, asyncio.Task[None]] = {}
        self._failed: dict[str, float] = {}  # until a time

    def try_again(self) -> None:
        """Let the next `of` try failed cards again, as files have come."""
        self._failed.clear()

    async def of(self, deployments: Sequence[Deployment]) -> list[Card]:
        """Return a card for each deployment, empty for models whose files are not here."""
        models = [_model_of(one) for one in deployments if one.base.entry.is_local]
        known, now = self._cards.keys() | self._making.keys(), time.monotonic()
        if missing := [one for one in dict.fromkeys(models) if one not in known and self._failed.get(one, now) <= now]:
            self._making |= dict.fromkeys(missing, asyncio.ensure_future(self._make(missing)))
        if making := {self._making[model] for model in models if model in self._making}:
            await asyncio.wait(making)  # they go on if the client hangs up
        return [self._card(one) for one in deployments]

    def _card(self, deployment: Deployment) -> Card:
        card: Card = self._cards.get(_model_of(deployment), {}) if deployment.base.entry.is_local else {}
        base = deployment.entry.adapter_of
        return card if base is None or not card else of_adapter(card, base)

    async def _make(self, models: Sequence[str]) -> None:
        try:
            async with contextlib.aclosing(run_octavo("show", "--json", *models, offline=True)) as lines:
                async for card in lines:
                    if "error" not in card:
                        self._cards[card.pop("asked")] = card
        except OctavoError as error:
            logger.warning("octavo show %s: %s", " ".join(models), error)
        finally:
            for model in models:
                del self._making[model]
                if model not in self._cards:
                    self._failed[model] = time.monotonic() + _FAILED_S


def _model_of(deployment: Deployment) -> str:
    """Return what `octavo serve` is given as the model; an adapter has its base's."""
    return deployment.base.entry.model or deployment.base.name
