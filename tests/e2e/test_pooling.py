"""The routes of models that pool, over servers of a small encoder and of a cross-encoder; and the official client."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import ml_dtypes
import numpy as np
import openai
import pytest
import schemathesis
import torch
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)
from transformers import PreTrainedTokenizerFast

from tests.e2e.hostile import BODIES, VALUES
from tests.e2e.server import running_server
from tests.models.small_text_encoder import write_model, write_modules

TEXTS = ["the cat sat on the mat", "a dog ran", "who is on the hill", "slow"]


@contextlib.contextmanager
def served(folder: Path, *flags: str) -> Iterator[httpx.Client]:
    given = ("--model", str(folder), "--served-model-name", "small", "小", "--dtype", "float32", "--cpu-threads", "1")
    with (
        running_server(folder, *given, "--disable-log-requests", *flags) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("embedder")
    write_model(folder, "BertModel")
    pooling = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}
    write_modules(folder, ("Pooling", pooling), ("Normalize", None), prompts={"query": "query: "})
    return folder


@pytest.fixture(scope="module")
def embeddings(embedder: Path) -> Iterator[httpx.Client]:
    with served(embedder, "--hf-overrides", '{"matryoshka_dimensions": [16, 32]}') as client:
        yield client


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("judge")
    return write_model(folder, "BertForSequenceClassification", num_labels=1), folder


@pytest.fixture(scope="module")
def scores(judge: tuple[Any, Path]) -> Iterator[httpx.Client]:
    with served(judge[1]) as client:
        yield client


def vectors(answer: httpx.Response) -> np.ndarray:
    assert answer.status_code == 200, answer.text
    return np.array([entry["embedding"] for entry in answer.json()["data"]], np.float32)


@pytest.mark.long
def test_texts_lists_and_tokens_in_numbers_and_bytes(embeddings: httpx.Client) -> None:
    listed = embeddings.post("/v1/embeddings", json={"input": TEXTS, "model": "small"})
    found = vectors(listed)
    assert found.shape == (4, 48)
    assert np.allclose(np.linalg.norm(found, axis=1), 1)
    tokens = embeddings.post("/tokenize", json={"prompt": TEXTS[0]}).json()["tokens"]
    num_tokens = sum(embeddings.post("/tokenize", json={"prompt": text}).json()["count"] for text in TEXTS)
    assert listed.json()["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens, "completion_tokens": 0}
    for same in (TEXTS[0], [TEXTS[0]], tokens, [tokens]):
        assert np.array_equal(vectors(embeddings.post("/v1/embeddings", json={"input": same})), found[:1])
    with openai.OpenAI(base_url=f"{embeddings.base_url}/v1", api_key="none", max_retries=0) as client:
        answer = client.embeddings.create(model="small", input=TEXTS)  # in base64, unless told otherwise
        assert np.array_equal(np.array([entry.embedding for entry in answer.data], np.float32), found)
    pooled = embeddings.post("/pooling", json={"input": TEXTS[:1], "encoding_format": "base64"}).json()["data"][0]
    assert np.array_equal(np.frombuffer(base64.b64decode(pooled["data"]), np.float32), found[0])
    by_token = embeddings.post("/pooling", json={"input": TEXTS[0], "task": "token_embed"}).json()["data"][0]["data"]
    assert np.array(by_token).shape == (len(tokens), 48)


def test_bytes_are_of_the_type_and_order_that_is_asked_for(embeddings: httpx.Client) -> None:
    found = vectors(embeddings.post("/v1/embeddings", json={"input": TEXTS}))
    kinds = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
    kinds |= {"fp8_e4m3": ml_dtypes.float8_e4m3fn, "fp8_e5m2": ml_dtypes.float8_e5m2}
    for name, kind in kinds.items():
        for order in ("little", "big"):
            asked = {"input": TEXTS, "embed_dtype": name, "endianness": order}
            answer = embeddings.post("/v1/embeddings", json={**asked, "encoding_format": "bytes"})
            assert answer.headers["content-type"] == "application/octet-stream"
            about = json.loads(answer.headers["metadata"])
            encoded = embeddings.post("/v1/embeddings", json={**asked, "encoding_format": "base64"}).json()["data"]
            pieces = [base64.b64decode(entry["embedding"]) for entry in encoded]
            assert [answer.content[one["start"] : one["end"]] for one in about["data"]] == pieces
            words = np.frombuffer(b"".join(pieces), f"{'<' if order == 'little' else '>'}u{np.dtype(kind).itemsize}")
            numbers = words.astype(words.dtype.newbyteorder("=")).view(kind).reshape(found.shape)
            assert np.array_equal(numbers.astype(np.float32), found.astype(kind).astype(np.float32))
            assert about["usage"]["prompt_tokens"] > 0 and about["data"][0]["shape"] == [48]
    named = embeddings.post("/v1/embeddings", json={"input": TEXTS, "encoding_format": "bytes", "model": "小"})
    assert json.loads(named.headers["metadata"])["model"] == "小"
    only = embeddings.post("/pooling", json={"input": TEXTS, "encoding_format": "bytes_only", "task": "token_embed"})
    assert "metadata" not in only.headers and len(only.content) % (4 * 48) == 0
    assert int(only.headers["x-octavo-prompt-tokens"]) == len(only.content) // (4 * 48)


def test_coheres_route_has_the_vectors_of_the_others_in_every_form(embeddings: httpx.Client) -> None:
    expected = vectors(embeddings.post("/v1/embeddings", json={"input": TEXTS}))
    bits = np.packbits(expected > 0, axis=1)
    forms = ["float", "base64", "ubinary", "binary"]
    ask = {"model": "small", "input_type": "search_document", "embedding_types": forms}
    answer = embeddings.post("/v2/embed", json={**ask, "texts": TEXTS}).json()
    found = answer["embeddings"]
    assert np.array_equal(np.array(found["float"], np.float32), expected)
    assert [base64.b64decode(one) for one in found["base64"]] == [one.tobytes() for one in expected]
    assert found["ubinary"] == bits.tolist() and found["binary"] == (bits.astype(int) - 128).tolist()
    assert answer["texts"] == TEXTS and answer["meta"]["billed_units"]["input_tokens"] > len(TEXTS)
    inputs = [{"content": [{"type": "text", "text": text}]} for text in TEXTS]
    assert embeddings.post("/v2/embed", json={**ask, "inputs": inputs}).json()["embeddings"] == found

    def one(**more: Any) -> list[float]:
        body = {"texts": [TEXTS[0]], "input_type": "search_document", **more}
        return embeddings.post("/v2/embed", json=body).json()["embeddings"]["float"][0]

    def usual(text: str, **more: Any) -> list[float]:
        return vectors(embeddings.post("/v1/embeddings", json={"input": text, **more}))[0].tolist()

    assert one(input_type=None) == one() == usual(TEXTS[0]), "without a purpose there is no prompt"
    assert one(input_type="search_query") == usual(f"query: {TEXTS[0]}")
    assert one(output_dimension=16) == usual(TEXTS[0], dimensions=16)
    assert one(max_tokens=4) == usual("the cat") and one(max_tokens=4, truncate="START") == usual("the mat")
    assert one(texts=["cat " * 300]) == one(texts=["cat " * 300], max_tokens=1000) == usual("cat " * 128)


def test_dimensions_prompts_and_cuts(embeddings: httpx.Client) -> None:
    whole = vectors(embeddings.post("/v1/embeddings", json={"input": TEXTS[:1], "use_activation": False}))
    for name in ("normalize", "softmax", "activation"):  # as it was called
        older = vectors(embeddings.post("/v1/embeddings", json={"input": TEXTS[:1], name: False}))
        assert np.array_equal(older, whole)
    cut = vectors(embeddings.post("/v1/embeddings", json={"input": TEXTS[0], "dimensions": 16}))[0]
    np.testing.assert_allclose(cut, whole[0, :16] / np.linalg.norm(whole[0, :16]), atol=1e-6)
    asked = vectors(embeddings.post("/v1/embeddings", json={"input": TEXTS[0], "prompt_name": "query"}))
    written = vectors(embeddings.post("/v1/embeddings", json={"input": f"query: {TEXTS[0]}"}))
    assert np.array_equal(asked, written)
    # 130 tokens, two of which are special.
    long = {"input": "cat " * 300, "truncate_prompt_tokens": -1}
    assert np.array_equal(
        vectors(embeddings.post("/v1/embeddings", json=long)),
        vectors(embeddings.post("/v1/embeddings", json={"input": "cat " * 128})),
    )
    left, right = ({"input": TEXTS[0], "truncate_prompt_tokens": 4, "truncation_side": s} for s in ("left", "right"))
    assert np.array_equal(vectors(embeddings.post("/v1/embeddings", json=right)),
                          vectors(embeddings.post("/v1/embeddings", json={"input": "the cat"})))  # fmt: skip
    assert np.array_equal(vectors(embeddings.post("/v1/embeddings", json=left)),
                          vectors(embeddings.post("/v1/embeddings", json={"input": "the mat"})))  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/embeddings", {"input": []}, "should not be empty"),
        ("/v1/embeddings", {}, "either input or messages"),
        ("/v1/embeddings", {"input": "cat " * 300}, "302 tokens and the model takes 130"),
        ("/v1/embeddings", {"input": "x", "dimensions": 17}, "dimensions must be 16, 32, got 17"),
        ("/v1/embeddings", {"input": [[5000]]}, "token id 5000"),
        ("/v1/embeddings", {"input": "\ud800"}, "valid Unicode"),
        ("/v1/embeddings", {"input": "x", "truncate_prompt_tokens": 2}, "leaves no room"),
        ("/v1/embeddings", {"input": "x", "truncate_prompt_tokens": -7}, "at least 1, or -1"),
        ("/v1/embeddings", {"input": "x", "prompt_name": "none"}, "not one of the model's (query)"),
        ("/v1/embeddings", {"input": ["x"] * 3000}, "2048 is the most"),
        ("/v1/embeddings", {"messages": [{"role": "user", "content": "x"}]}, "no chat template"),
        ("/v1/embeddings", {"input": "x", "endianness": "big"}, "for encoding_format base64 and bytes"),
        ("/v1/embeddings", {"input": "x", "sonst": 1}, "Unrecognized request argument"),
        ("/pooling", {"input": "x", "task": "dream"}, "task must be one of"),
        ("/classify", {"input": "x"}, "its tasks are embed and token_embed"),
        ("/score", {"text_1": ["x", "y"], "text_2": ["x", "y", "z"]}, "2 queries for 3 documents"),
        ("/rerank", {"query": "x", "documents": []}, "1 to 2048 entries"),
        ("/v1/embeddings", {"input": "x", "truncate_prompt_tokens": 9999}, "is 9999, and the model takes 1"),
        ("/v2/embed", {"texts": ["x"], "input_type": 1}, "input_type"),
        ("/v2/embed", {"input_type": "clustering"}, "either texts or inputs"),
        ("/v2/embed", {"texts": ["x"], "input_type": "image"}, "input_type"),
        ("/v2/embed", {"texts": ["x"], "input_type": "clustering", "embedding_types": ["int8"]}, "embedding_types"),
        ("/v2/embed", {"texts": ["cat " * 300], "input_type": "clustering", "truncate": "NONE"}, "302 tokens"),
        ("/rerank", {"query": "x", "documents": [{"title": "y"}]}, "objects like"),
        ("/rerank", {"query": "x", "documents": ["y"], "instruction": "z"}, "takes no instruction"),
        ("/v1/completions", {"prompt": "x"}, "is a pooling model and generates no text"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}]},
            "is a pooling model and generates no text",
        ),
    ],
)
def test_what_is_wrong_is_said(embeddings: httpx.Client, path: str, body: dict[str, Any], message: str) -> None:
    content = json.dumps(body)  # in ASCII, so that it may hold what is no Unicode
    answer = embeddings.post(path, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    assert "prompt" in body or answer.json()["error"]["param"] != "prompt", "it names what the body has"


@pytest.mark.parametrize(
    ("path", "body", "param", "which"),
    [
        ("/v1/embeddings", {"input": ["x", "cat " * 300]}, "input", "input[1]: "),
        ("/v1/embeddings", {"input": ["x" * 200_000, "x"]}, "input", "input[0]: "),
        ("/pooling", {"input": [[5], [5, 5000]]}, "input", "input[1]: "),
        ("/v2/embed", {"texts": ["cat " * 300], "input_type": "clustering", "truncate": "NONE"}, "texts", "the text"),
        ("/v2/embed", {"texts": ["x"], "output_dimension": 17}, "output_dimension", "output_dimension must be 16, 32"),
        ("/v2/embed", {"texts": ["x"], "max_tokens": 1}, "max_tokens", "max_tokens 1 leaves no room"),
        (
            "/v2/embed",
            {"inputs": [{"content": [{"type": "text", "text": "x"}]}], "truncate_prompt_tokens": 1},
            "truncate_prompt_tokens",
            "truncate_prompt_tokens 1 leaves no room",
        ),
        ("/classify", {"input": "x"}, "model", "task classify is not this model's"),
        ("/score", {"queries": ["x", "cat " * 300], "items": ["y", "z"]}, "queries", "queries[1]: "),
        ("/score", {"text_1": "x", "data_2": ["y", "cat " * 300]}, "data_2", "data_2[1]: "),
        ("/rerank", {"query": "cat " * 300, "documents": ["y", "z"]}, "query", "the text has"),
        ("/rerank", {"query": "x" * 200_000, "documents": ["y"], "max_tokens_per_query": 9}, "query", "the prompt has"),
        ("/rerank", {"query": "x", "documents": ["y", "cat " * 300]}, "documents", "documents[1]: "),
    ],
)
def test_the_text_at_fault_is_named(
    embeddings: httpx.Client, path: str, body: dict[str, Any], param: str, which: str
) -> None:
    answer = embeddings.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert error["message"].startswith(which)


@pytest.mark.long
def test_pairs_are_ranked_as_by_the_cross_encoder(judge: tuple[Any, Path], scores: httpx.Client) -> None:
    reference, folder = judge
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    expected = []
    for text in TEXTS[1:]:
        pair = tokenizer(TEXTS[0], text, return_tensors="pt")
        pair["token_type_ids"] = torch.tensor([tokenizer.backend_tokenizer.encode(TEXTS[0], text).type_ids])
        with torch.no_grad():
            expected.append(torch.sigmoid(reference(**pair).logits[0, 0]).item())
    body = {"text_1": TEXTS[0], "text_2": TEXTS[1:]}
    for path in ("/score", "/v1/score"):
        found = scores.post(path, json=body).json()["data"]
        np.testing.assert_allclose([entry["score"] for entry in found], expected, atol=1e-4)
    ranked = sorted(range(3), key=lambda i: -expected[i])
    documents = [TEXTS[1], {"text": TEXTS[2]}, TEXTS[3]]
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        answer = scores.post(
            path, json={"query": TEXTS[0], "documents": documents, "top_n": 2, "model": "small"}
        ).json()
        assert [entry["index"] for entry in answer["results"]] == ranked[:2]
        assert [entry["document"]["text"] for entry in answer["results"]] == [TEXTS[1 + i] for i in ranked[:2]]
    classes = scores.post("/classify", json={"input": TEXTS}).json()["data"]
    assert [entry["num_classes"] for entry in classes] == [1] * 4


def test_scores_of_embeddings_are_cosines(embeddings: httpx.Client) -> None:
    query = vectors(embeddings.post("/v1/embeddings", json={"input": TEXTS[0], "prompt_name": "query"}))[0]
    documents = vectors(embeddings.post("/v1/embeddings", json={"input": TEXTS[1:], "prompt_name": ""}))
    found = embeddings.post("/score", json={"queries": TEXTS[0], "documents": TEXTS[1:]}).json()["data"]
    np.testing.assert_allclose([entry["score"] for entry in found], documents @ query, atol=1e-6)
    cut = {"queries": TEXTS[0], "documents": [TEXTS[1], TEXTS[1] + " on"], "max_tokens_per_doc": 3}
    first, second = embeddings.post("/score", json=cut).json()["data"]
    assert first["score"] == second["score"]


@pytest.mark.long
def test_requests_of_other_salts_share_no_cached_prefix(tmp_path: Path) -> None:
    with running_server(tmp_path, "--runner", "pooling") as server:

        def num_hits(**fields: str) -> float:
            before = server.metric("prefix_cache_hits_total")
            body = {"input": "one two three " * 20, **fields}
            assert httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=60).status_code == 200
            return server.metric("prefix_cache_hits_total") - before

        assert num_hits(cache_salt="mine") == 0
        assert num_hits(cache_salt="mine") > 0
        assert num_hits(cache_salt="yours") == 0 == num_hits()


GOOD: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": "x"},
    "/pooling": {"input": "x"},
    "/classify": {"input": "x"},
    "/score": {"text_1": "x", "text_2": ["y"]},
    "/rerank": {"query": "x", "documents": ["y"]},
    "/v2/embed": {"texts": ["x"], "input_type": "search_query"},
}
FIELDS = (
    "input", "messages", "encoding_format", "dimensions", "truncate_prompt_tokens", "truncation_side", "task", "query",
    "documents", "top_n", "text_1", "text_2", "prompt_name", "timeout", "priority", "request_id", "model",
    "instruction",
    "max_tokens_per_doc", "use_activation", "chat_template_kwargs", "add_special_tokens", "texts", "inputs",
    "input_type", "embedding_types", "output_dimension", "truncate", "embed_dtype", "endianness", "queries", "items",
    "return_documents", "max_tokens_per_query", "cache_salt",
)  # fmt: skip


@pytest.mark.long
def test_nothing_that_strangers_send_is_the_servers_fault(embeddings: httpx.Client, scores: httpx.Client) -> None:
    cases = list(itertools.product((embeddings, scores), GOOD, FIELDS, VALUES))
    for server, path, field, value in random.Random(0).sample(cases, 600):
        content = json.dumps(GOOD[path] | {field: value})
        answer = server.post(path, content=content, headers={"Content-Type": "application/json"})
        assert answer.status_code < 500, (path, field, value, answer.text)
    for server, (path, name) in itertools.product((embeddings, scores), itertools.product(GOOD, BODIES)):
        answer = server.post(path, content=BODIES[name], headers={"Content-Type": "application/json"})
        assert 400 <= answer.status_code < 500 and answer.json()["error"]["message"], (path, name, answer.text)
    found = vectors(embeddings.post("/v1/embeddings", json={"input": TEXTS}))
    assert np.allclose(np.linalg.norm(found, axis=1), 1)


@pytest.mark.long
@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize("path", GOOD)
def test_answers_are_as_the_description_says(
    scores: httpx.Client, embeddings: httpx.Client, path: str, mode: GenerationMode
) -> None:
    server = scores if path in ("/classify", "/score", "/rerank") else embeddings
    described = schemathesis.openapi.from_url(f"{server.base_url}/openapi.json")[path]["POST"]
    expected: list[Any] = [not_a_server_error, status_code_conformance, content_type_conformance]
    expected.append(response_schema_conformance if mode is GenerationMode.POSITIVE else negative_data_rejection)

    @given(case=described.as_strategy(generation_mode=mode))
    @settings(
        max_examples=30, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )  # fmt: skip
    def answer(case: schemathesis.Case) -> None:
        case.call_and_validate(checks=expected)

    answer()
