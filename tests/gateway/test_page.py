"""The gateway's page as HTTP sees it: its files, who may see its numbers, and on which port."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from octavo.gateway.page import FILES
from tests.gateway.fakes import Asked, FakeLaunch, gateway
from tests.waiting import Clock

PATHS = ["/ui", *(f"/ui/{name}" for name in FILES if name != "gateway.html")]


def test_files_are_open_strict_and_ask_for_nothing_from_elsewhere(clock: Clock) -> None:
    async def run() -> None:
        async with gateway({"a": {}}, api_key=["secret"]) as gate:
            for path in PATHS:
                answer = await gate.http.get(path)
                assert answer.status_code == 200, path
                assert "default-src 'none'" in answer.headers["content-security-policy"]
                text = answer.text.replace("http://www.w3.org/2000/svg", "")
                assert not re.search(r"https?://|//[a-z]+\.|@import|style=|onclick=", text), path
            assert (await gate.http.get("/ui/")).headers["location"] == "../ui"
            for path in ("/ui/gateway.html", "/ui/nothing.js", "/ui/..%2fpage.py", "/ui/%2e%2e/page.py"):
                assert (await gate.http.get(path)).status_code == 404
            assert (await gate.http.post("/ui")).status_code == 404
            assert gate.launch.begun == [], "no model is asked for the page"

    clock.run(run())


def test_numbers_are_those_of_models_replicas_and_memory_and_need_a_key(clock: Clock) -> None:
    async def behave(asked: Asked) -> None:
        asked.reply(b"{}", 500 if asked.json.get("fails") else 200)

    async def run() -> None:
        models = {"a": {"replicas": 2, "memory_gib": 1.5, "aliases": ["b"]}, "c": {"memory_gib": 1}}
        async with gateway(models, FakeLaunch(behave), api_key=["secret"], memory_gib=4) as gate:
            assert (await gate.http.get("/ui/stats")).status_code == 401
            gate.http.headers["Authorization"] = "Bearer secret"
            before = (await gate.http.get("/ui/stats")).json()
            assert [one["state"] for one in before["models"]] == ["stopped", "stopped"]
            assert (before["memory"]["held_gib"], before["memory"]["total_gib"]) == (0, 4)
            for fields in ({}, {"fails": True}, {"model": "none"}):
                await gate.ask(**{"model": "b", **fields})
            after = (await gate.http.get("/ui/stats")).json()
            a, c = after["models"]
            assert (a["name"], a["aliases"], a["state"], a["memory_gib"]) == ("a", ["b"], "ready", 3)
            assert [one["state"] for one in a["replicas"]] == ["up", "up"]
            assert (a["answered"], a["failed"], a["starts"], a["in_flight"]) == (2, 1, 1, 0)
            assert (c["answered"], c["replicas"], after["refused"]) == (0, [], 1)
            assert after["memory"]["held_gib"] == 3
            assert after["first_byte"][0] == before["first_byte"][0] + 2
            assert after["keys"] is None

    clock.run(run())


def test_with_keys_that_have_limits_the_page_is_on_the_admin_port(clock: Clock, tmp_path: Path) -> None:
    async def run() -> None:
        flags = {"keys": str(tmp_path / "keys.db"), "admin_key": ["admin"], "admin_port": 0}
        async with gateway({"a": {}}, **flags) as gate:
            admin = {"Authorization": "Bearer admin"}
            made = (await gate.http.post(f"{gate.admin_url}/keys", json={"name": "team"}, headers=admin)).json()
            client = {"Authorization": f"Bearer {made['key']}"}
            await gate.http.post("/v1/chat/completions", json={"model": "a"}, headers=client)
            refused = await gate.http.get("/ui", headers=client)
            assert refused.status_code == 404 and "--admin-port" in refused.json()["error"]["message"]
            assert (await gate.http.get("/ui/stats", headers=client)).status_code == 404
            assert (await gate.http.get(f"{gate.admin_url}/ui")).status_code == 200
            for headers in ({}, client):
                assert (await gate.http.get(f"{gate.admin_url}/ui/stats", headers=headers)).status_code == 401
            stats = (await gate.http.get(f"{gate.admin_url}/ui/stats", headers=admin)).json()
            assert [(key["name"], key["requests"]) for key in stats["keys"]] == [("team", 1)]
            assert made["key"] not in str(stats)

    clock.run(run())


@pytest.mark.parametrize("name", sorted(FILES))
def test_each_file_is_there(name: str) -> None:
    assert FILES[name].is_file()
