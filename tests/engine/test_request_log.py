"""A line of the log stays a line, whatever a request brings."""

from __future__ import annotations

import logging
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from octavo.engine.output_processor import OutputProcessor
from octavo.engine.request_log import brief, log_request
from octavo.engine.wire import decode_frontend_message, encode_message
from octavo.errors import EngineDeadError
from octavo.request import EngineRequest, Prompt, SequenceOutput
from octavo.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams


def _log(
    tokenizer: Any, caplog: pytest.LogCaptureFixture, request: EngineRequest, max_length: int | None = None
) -> logging.LogRecord:
    """Return the line of a request that is aborted at once."""
    caplog.set_level(logging.INFO, "octavo")
    outputs = OutputProcessor(tokenizer, log_end=partial(log_request, max_length=max_length))
    outputs.add(request, f"r-{request.request_id}")
    outputs.abort(request.request_id)
    [record] = caplog.records
    return record


def _request(params: SamplingParams, response_id: str = "") -> EngineRequest:
    return EngineRequest("7", Prompt([1], "prompt"), params, [], 5, 0.0, response_id=response_id)


def test_long_parameters_are_shown_by_their_beginning_or_their_number(
    tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    params = SamplingParams(
        stop=["x" * 5000, "y"], bad_words=["b"] * 5000, logit_bias=dict.fromkeys(range(5000), 1.0),
        structured_outputs=StructuredOutputsParams(json={"enum": ["z" * 5000] * 9, "deep": {"list": [0] * 5000}}),
        temperature=0.5,
    )  # fmt: skip
    record = _log(tokenizer, caplog, _request(params), 10)
    assert len(record.getMessage()) < 5000 and len(str(record.__dict__)) < 12_000
    assert "'temperature': 0.5" in record.getMessage() and "'bad_words': '(5000 items)'" in record.getMessage()


@pytest.mark.parametrize(
    ("prompt", "max_length", "shown"),
    [
        (Prompt([1, 2], "prompt"), None, ": 'prompt'"),
        (Prompt([1, 2], "prompt"), 2, ": 'pr'..."),
        (Prompt([1, 2], "prompt"), 0, ""),
        (Prompt([1, 2]), None, ": [1, 2]"),
        (Prompt([1, 2]), 1, ": [1]..."),
    ],
)
def test_the_line_ends_with_the_prompts_beginning_and_what_the_client_chose(
    tokenizer: Any, caplog: pytest.LogCaptureFixture, prompt: Prompt, max_length: int | None, shown: str
) -> None:
    request = _request(SamplingParams(output_kind=RequestOutputKind.DELTA, seed=3))
    request.prompt = prompt
    record = _log(tokenizer, caplog, request, max_length)
    assert record.getMessage().endswith(f" output tokens{shown} {{'seed': 3}}")
    field = getattr(record, "prompt", None)
    assert shown.removesuffix("...") == ("" if field is None else f": {field!r}")


@pytest.mark.parametrize(("response_id", "named"), [("", "r"), ("cmpl-r", "cmpl-r"), ("resp_1", "r (resp_1)")])
def test_a_line_has_the_clients_id_and_the_engines_apart(
    tokenizer: Any, caplog: pytest.LogCaptureFixture, response_id: str, named: str
) -> None:
    record = _log(tokenizer, caplog, _request(SamplingParams(), response_id))
    fields = vars(record)
    assert (fields["request_id"], fields["engine_request_id"], fields.get("response_id", "")) == ("r", "7", response_id)
    assert record.getMessage().startswith(f"{named}: abort after ")


def test_the_answers_id_does_not_go_to_the_core() -> None:
    sent = decode_frontend_message(encode_message(_request(SamplingParams(), "cmpl-r")))
    assert isinstance(sent, EngineRequest) and sent.response_id == ""


def test_short_parameters_are_shown_as_they_are() -> None:
    options = msgspec.to_builtins(SamplingParams(stop=["a"], seed=3, logit_bias={5: 1.0}))
    assert brief(options) == options


@pytest.mark.parametrize("is_on", [True, False])
def test_a_request_is_one_line_at_its_end_with_its_times_tokens_and_error(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_on: bool
) -> None:
    caplog.set_level(logging.INFO, "octavo")
    clock: SimpleNamespace = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr("octavo.engine.output_processor.time", clock)
    outputs = OutputProcessor(tokenizer, log_end=partial(log_request, max_length=2) if is_on else None)
    outputs.add(_request(SamplingParams(seed=3)), "r-7")
    for clock.now, tokens, reason in ((3.0, [5, 6], None), (5.5, [7], "length")):
        outputs.update([
            SequenceOutput("7", 0, tokens, finish_reason=reason, first_scheduled_time=1.0, num_cached_tokens=1)
        ])  # fmt: skip
    outputs.add(_request(SamplingParams()), "left")
    outputs.abort("7")
    outputs.add(_request(SamplingParams()), "lost")
    outputs.drop("7", EngineDeadError("the engine core has ended."))
    never = "5.500 s (queue none, first token none), 1 prompt tokens (0 cached), 0 output tokens: 'pr'... {}"
    assert caplog.messages == is_on * [
        "r: length after 5.500 s (queue 1.000 s, first token 3.000 s), 1 prompt tokens (1 cached), 3 output tokens: "
        "'pr'... {'seed': 3}",
        f"left: abort after {never}",
        f"lost: error after {never}: the engine core has ended.",
    ]
    if is_on:
        fields = {"request_id": "r", "engine_request_id": "7", "finish_reason": "length", "queue_s": 1.0, "ttft_s": 3.0,
                  "total_s": 5.5, "num_prompt_tokens": 1, "num_cached_tokens": 1, "num_output_tokens": 3,
                  "sampling_params": {"seed": 3}}  # fmt: skip
        assert vars(caplog.records[0]).items() >= fields.items() and "error" not in vars(caplog.records[0])
        assert vars(caplog.records[2])["error"] == "the engine core has ended."
