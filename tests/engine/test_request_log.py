"""A line of the log stays a line, whatever a request brings."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from octavo.engine.output_processor import OutputProcessor
from octavo.engine.request_log import brief, log_request
from octavo.request import EngineRequest, Prompt, SequenceOutput
from octavo.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams


def _request(params: SamplingParams) -> EngineRequest:
    return EngineRequest("7", Prompt([1], "p"), params, [], 5, 0.0)


def test_long_parameters_are_shown_by_their_beginning_or_their_number(caplog: pytest.LogCaptureFixture) -> None:
    params = SamplingParams(
        stop=["x" * 5000, "y"], bad_words=["b"] * 5000, logit_bias=dict.fromkeys(range(5000), 1.0),
        structured_outputs=StructuredOutputsParams(json={"enum": ["z" * 5000] * 9, "deep": {"list": [0] * 5000}}),
        temperature=0.5,
    )  # fmt: skip
    with caplog.at_level(logging.INFO):
        log_request(logging.getLogger("octavo.server"), "r-7", _request(params), 10)
    [record] = caplog.records
    assert len(record.getMessage()) < 5000 and len(str(record.__dict__)) < 12_000
    assert "'temperature': 0.5" in record.getMessage() and "'bad_words': '(5000 items)'" in record.getMessage()


def test_what_the_front_end_chose_is_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    params = SamplingParams(output_kind=RequestOutputKind.DELTA, seed=3)
    with caplog.at_level(logging.INFO):
        log_request(logging.getLogger("octavo.server"), "r-7", _request(params), 10)
    assert caplog.records[0].getMessage() == "r: 1 prompt tokens: 'p' {'seed': 3}"


@pytest.mark.parametrize(("response_id", "named"), [("", "r"), ("cmpl-r", "cmpl-r"), ("resp_1", "r (resp_1)")])
def test_a_line_has_the_clients_id_and_the_engines_apart(
    caplog: pytest.LogCaptureFixture, response_id: str, named: str
) -> None:
    with caplog.at_level(logging.INFO):
        log_request(logging.getLogger("octavo.server"), "r-7", _request(SamplingParams()), 0, response_id)
    fields = vars(caplog.records[0])
    assert (fields["request_id"], fields["engine_request_id"], fields.get("response_id", "")) == ("r", "7", response_id)
    assert caplog.messages == [f"{named}: 1 prompt tokens {{}}"]


def test_short_parameters_are_shown_as_they_are() -> None:
    options = msgspec.to_builtins(SamplingParams(stop=["a"], seed=3, logit_bias={5: 1.0}))
    assert brief(options) == options


@pytest.mark.parametrize("is_on", [True, False])
def test_the_end_of_a_request_is_a_line_with_its_times_and_tokens(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_on: bool
) -> None:
    caplog.set_level(logging.INFO, "octavo")
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr("octavo.engine.output_processor.time", clock)
    outputs = OutputProcessor(tokenizer, logs_ends=is_on)
    outputs.add(_request(SamplingParams()), "r-7")
    for clock.now, tokens, reason in ((3.0, [5, 6], None), (5.5, [7], "length")):
        outputs.update([
            SequenceOutput("7", 0, tokens, finish_reason=reason, first_scheduled_time=1.0, num_cached_tokens=1)
        ])  # fmt: skip
    outputs.add(_request(SamplingParams()), "left")
    outputs.abort("7")
    assert caplog.messages == is_on * [
        "r: length after 5.500 s (queue 1.000 s, first token 3.000 s), 1 prompt tokens (1 cached), 3 output tokens",
        "left: abort after 5.500 s (queue none, first token none), 1 prompt tokens (0 cached), 0 output tokens",
    ]
    if is_on:
        fields = {"request_id": "r", "engine_request_id": "7", "finish_reason": "length", "queue_s": 1.0, "ttft_s": 3.0,
                  "total_s": 5.5, "num_prompt_tokens": 1, "num_cached_tokens": 1, "num_output_tokens": 3}  # fmt: skip
        assert vars(caplog.records[0]).items() >= fields.items()
