"""Routes of models that pool, before one that generates."""

from __future__ import annotations

import httpx

from tests.entrypoints.fake_engine import FakeEngine


def test_a_model_that_generates_has_no_vectors(http: httpx.Client, engine: FakeEngine) -> None:
    for path, body in (("/v1/embeddings", {"input": "x"}), ("/rerank", {"query": "x", "documents": ["y"]})):
        answer = http.post(path, json=body)
        assert answer.status_code == 400
        assert "generates text and has no vectors" in answer.json()["error"]["message"]
