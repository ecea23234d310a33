"""A catalogue that changes while the gateway runs."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from tests.gateway.fakes import Asked, FakeLaunch, answer_plainly, be_silent, fake_servers, gateway, until
from tests.waiting import Clock


def test_a_catalogue_that_changes_is_read_again_and_a_broken_one_is_not_taken(
    clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "models.yaml"
    file.write_text("models: {a: {}, b: {}}")

    async def run() -> None:
        async with gateway(str(file)) as gate:
            await gate.ask("a")
            await gate.ask("b")
            file.write_text("models: {a: {aliases: [x], keep_alive: 7}, b: {flags: {max-model-len: 64}}, c: {}}")
            await until(lambda: "c" in gate.server.models.names())
            assert (await gate.ask("x")).status_code == 200
            await until(lambda: gate.launch.running("b") == 0)
            assert gate.launch.begun == ["a", "b"], "a goes on, as nothing of it changed"
            assert (await gate.ask("b")).status_code == 200
            file.write_text("models: {a: {colour: red}}")
            gate.server.reload()
            assert "still holds" in caplog.text and "colour" in caplog.text
            assert (await gate.ask("a")).status_code == 200
            file.write_text("models: {b: {flags: {max-model-len: 64}}}")
            gate.server.reload()
            assert (await gate.ask("a")).status_code == 404
            await until(lambda: gate.launch.running("a") == 0)

    with caplog.at_level(logging.INFO):
        clock.run(run())


def test_a_model_that_leaves_the_catalogue_ends_its_answers_first(clock: Clock, tmp_path: Path) -> None:
    go_on = asyncio.Event()

    async def behave(asked: Asked) -> None:
        await go_on.wait()
        asked.reply(b"{}")

    async def run() -> None:
        file = tmp_path / "models.yaml"
        file.write_text("models: {a: {}}")
        async with gateway(str(file), FakeLaunch(behave)) as gate:
            asking = asyncio.ensure_future(gate.ask("a"))
            await until(lambda: gate.launch.servers and gate.launch.last("a").asked)
            file.write_text("models: {b: {}}")
            gate.server.reload()
            assert (await gate.ask("a")).status_code == 404 and gate.launch.running("a") == 1
            go_on.set()
            assert (await asking).status_code == 200
            await until(lambda: gate.launch.running("a") == 0)

    clock.run(run())


def test_models_that_have_left_the_catalogue_are_forgotten(clock: Clock, tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"

    async def run() -> None:
        async with fake_servers(answer_plainly) as (server,):
            entries = [f"addresses: ['{server.address}/{n}']" for n in range(3)] + [f"replicas: {n}" for n in (2, 3, 4)]
            file.write_text("models: {a: {}}")
            async with gateway(str(file)) as gate:
                for entry in entries:
                    file.write_text(f"models: {{a: {{{entry}}}}}")
                    gate.server.reload()
                    assert (await gate.ask()).status_code == 200
                    retired = gate.server.models._retired
                    await until(lambda retired=retired: all(one.has_ended for one in retired))
                assert len(gate.server.models._retired) == 1, "the last one"

    clock.run(run())


@pytest.mark.parametrize("state", ["waiting", "starting"])
def test_a_preload_ends_when_its_model_leaves_the_catalogue(clock: Clock, tmp_path: Path, state: str) -> None:
    file = tmp_path / "models.yaml"
    file.write_text("models: {a: {memory_gib: 1}}")

    async def run() -> None:
        launch = FakeLaunch(be_silent)
        async with gateway(str(file), launch, memory_gib=1 if state == "waiting" else 2) as gate:
            asking = asyncio.ensure_future(gate.ask("a"))
            await until(lambda: launch.servers and launch.last("a").asked)
            launch.may_start.clear()
            file.write_text("models: {a: {memory_gib: 1}, b: {memory_gib: 1, preload: true}}")
            gate.server.reload()
            preloaded = gate.deployment("b")
            await until(lambda: preloaded.state == state)
            file.write_text("models: {a: {memory_gib: 1}}")
            gate.server.reload()
            await until(lambda: preloaded.has_ended)
            assert not gate.server.models.budget._line and gate.server.models.budget.held_gib == 1
            assert launch.begun == ["a", "b"][: 1 if state == "waiting" else 2]
            asking.cancel()

    clock.run(run())


def test_a_fault_ends_neither_health_checks_nor_the_watch_over_the_catalogue(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "models.yaml"
    file.write_text("models: {a: {}}")
    done: list[str] = []

    def fail_once(name: str) -> None:
        done.append(name)
        if done.count(name) == 1:
            raise ValueError(f"odd {name}")

    async def check(_: float) -> None:
        fail_once("check")

    async def run() -> None:
        async with gateway(str(file)) as gate:
            monkeypatch.setattr(gate.server.models, "check_health", check)
            monkeypatch.setattr(gate.server, "reload", lambda: fail_once("reload"))
            file.write_text("models: {b: {}}")
            await until(lambda: done.count("check") > 1 and done.count("reload") > 1)
            assert "ValueError: odd check" in caplog.text and "ValueError: odd reload" in caplog.text

    clock.run(run())
