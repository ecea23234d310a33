"""The page at /ui as HTTP sees it: its files, their headers, and the numbers behind the live view."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

from octavo.entrypoints.ui import FILES
from octavo.kv_cache.block_pool import BlockPool, BlockState
from octavo.page_files import SHARED
from octavo.stats import EngineStats
from tests.entrypoints.fake_engine import FakeEngine, serving


def test_every_file_is_served_with_a_strict_policy(http: httpx.Client) -> None:
    assert {path.name for path in SHARED.iterdir()} == set(FILES)
    paths = ["/ui", *(f"/ui/{name}" for name in FILES if name != "index.html")]
    for path in paths:
        answer = http.get(path)
        assert answer.status_code == 200
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert http.get(path, headers={"If-None-Match": answer.headers["etag"]}).status_code in (200, 304)
    assert http.get("/ui/").headers["location"] == "../ui"


@pytest.mark.parametrize("name", ["index.html", "nothing.js", "..%2f__init__.py", "%2e%2e/__init__.py"])
def test_nothing_else_is_served(http: httpx.Client, name: str) -> None:
    assert http.get(f"/ui/{name}").status_code == 404


def test_the_page_asks_for_nothing_from_elsewhere() -> None:
    for name in FILES:
        text = (SHARED / name).read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|//[a-z]+\.|@import|style=|onclick=", text), name


def test_stats_are_counters_and_runs_of_blocks(http: httpx.Client, engine: FakeEngine) -> None:
    engine.metrics.record_step(EngineStats(step_s=0.5, predicted_step_s=0.25))
    before = http.get("/ui/stats").json()
    assert before["step"][1] - before["predicted_step"][1] == 0.25
    assert before["blocks"] == [[3, 1], [2, 2], [1, 1], [0, 4]]
    assert before["sequences"] == [{
        "request_id": "456789", "is_running": True, "num_prompt_tokens": 20, "num_computed_tokens": 16,
        "num_output_tokens": 0, "num_blocks": 2, "num_step_tokens": 16,
    }], "the whole id would let others cancel the request"  # fmt: skip
    assert (before["model"], before["block_size"]) == ("org/fake", 16)
    assert http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 4}).status_code == 200
    after = http.get("/ui/stats").json()
    assert after["ttft"][0] == before["ttft"][0] + 1
    assert after["itl"][0] == before["itl"][0] + 3
    assert after["itl"][1] > before["itl"][1]
    assert after["finished"]["length"] == before["finished"]["length"] + 1
    assert after["time_s"] > before["time_s"]


def test_the_page_is_open_and_its_numbers_need_the_key(tiny_tokenizer: Path) -> None:
    with (
        serving(FakeEngine(tiny_tokenizer), api_key=["secret"], root_path="/llm") as address,
        httpx.Client(base_url=address) as http,
    ):
        for prefix in ("", "/llm"):
            assert http.get(prefix + "/ui").status_code == 200
            assert http.get(prefix + "/ui/app.js").status_code == 200
            assert http.get(prefix + "/ui/stats").status_code == 401
            key = {"Authorization": "Bearer secret"}
            assert http.get(prefix + "/ui/stats", headers=key).json()["running"] == 0


def test_while_the_model_loads_the_page_is_there(http: httpx.Client, engine: FakeEngine) -> None:
    engine.is_ready = False
    assert http.get("/ui").status_code == 200
    answer = http.get("/ui/stats")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_loading")


def test_states_of_blocks() -> None:
    pool = BlockPool(5)
    blocks = [pool.allocate() for _ in range(3)]
    pool.share(blocks[1])
    pool.register(blocks[2], b"key")
    pool.release(blocks[2])
    expected = {blocks[0]: BlockState.USED, blocks[1]: BlockState.SHARED, blocks[2]: BlockState.CACHED}
    assert pool.states() == bytes(expected.get(block, BlockState.FREE) for block in range(5))
