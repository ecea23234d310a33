"""--speculative-config and the older flags: what they mean, and what is refused."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from octavo.config import EngineConfig
from octavo.engine.core import EngineCore
from octavo.errors import ConfigError
from octavo.request import EngineRequest, Prompt
from octavo.sampling.sampling_table import Samples
from octavo.sampling_params import SamplingParams
from octavo.speculative.synthetic import SyntheticAcceptance
from octavo.speculative_config import SpeculativeConfig, parse
from tests.execution.test_runner import EOS, config_of, model

__all__ = ["model"]


def test_both_ways_to_say_it_mean_the_same() -> None:
    newer = parse({"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2})
    older = parse(None, model="[ngram]", num_speculative_tokens=4, prompt_lookup_max=4, prompt_lookup_min=2)
    assert newer == older
    assert newer is not None
    assert (newer.method, newer.num_speculative_tokens, newer.prompt_lookup_min, newer.prompt_lookup_max) == (
        "ngram", 4, 2, 4,
    )  # fmt: skip
    assert parse({"model": "ngram"}, num_speculative_tokens=4) == parse(
        {"method": "ngram", "num_speculative_tokens": 4}
    )
    assert parse(None) is None and parse({"method": "none"}) is None


@pytest.mark.parametrize(
    ("given", "bounds"), [({}, (5, 5)), ({"prompt_lookup_max": 3}, (3, 3)), ({"prompt_lookup_min": 2}, (2, 2))]
)
def test_one_bound_of_the_lookup_stands_for_both(given: dict[str, Any], bounds: tuple[int, int]) -> None:
    config = parse({"method": "ngram", **given})
    assert config is not None
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == bounds


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"num_speculative_tokens": 3}, "no speculative method"),
        ({"method": "ngrams"}, "'ngrams' is unknown; ngram, suffix"),
        ({"method": "mlp_speculator"}, "mlp_speculator is not built yet; ngram, suffix"),
        ({"method": "ngram", "tokens": 3}, "has tokens, which nothing reads; method, num_speculative_tokens"),
        ({"method": "ngram", "num_speculative_tokens": "3"}, "num_speculative_tokens .* must be an integer, got '3'"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "between 1 and 128, got 0"),
        ({"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 2}, "at most prompt_lookup_max, got 4 and 2"),
        ({"method": "ngram", "quantization": "int8"}, "quantization is for methods with a draft model"),
        ({"method": "ngram", "suffix_decoding_max_tree_depth": 3}, "is for the method suffix, and the method is ngram"),
        ({"model": "a/b", "prompt_lookup_max": 3}, "is for the method ngram, and the method is draft_model"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 2}, "min_token_prob must be between 0 and 1, got 2"),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": True}, "must be an integer, got True"),
        ({"method": "none", "num_speculative_tokens": 4}, "none takes no num_speculative_tokens; leave out the method"),
        ({"method": "ngram", "disable_by_batch_size": 0}, "disable_by_batch_size must be 1 or more, got 0"),
        ({"method": "ngram", "synthetic_acceptance_rates": [0.5, 0.6]}, "none greater than the one before"),
        ({"method": "ngram", "rejection_sample_method": "synthetic"}, "needs synthetic_acceptance_rates"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse(given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"method": "mtp", "quantization": "int8"}, "own checkpoint; leave its quantization out"),
        ({"method": "mtp", "revision": "main"}, "own checkpoint; leave its revision out"),
        ({"quantization": "int9"}, "quantization of --speculative-config int9 is not built yet on CPUs; int8, int4"),
        ({"quantization": "gptq"}, "quantization of --speculative-config gptq is for checkpoints quantized with gptq"),
    ],
)
def test_what_the_draft_cannot_honour_is_refused(model: Path, given: dict[str, Any], said: str) -> None:
    draft = given if "method" in given else {"model": str(model), **given}
    with pytest.raises(ConfigError, match=said):
        config_of(model, speculative_config=draft)


def test_two_values_for_one_thing_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--ngram-prompt-lookup-max 3 and prompt_lookup_max 4 .* differ"):
        parse({"method": "ngram", "prompt_lookup_max": 4}, prompt_lookup_max=3)


def test_the_configuration_reaches_the_core(model: Path) -> None:
    config = config_of(model, speculative_config={"method": "suffix", "synthetic_acceptance_rates": [0.5, 0.25]})
    sent = msgspec.json.decode(msgspec.json.encode(config), type=EngineConfig)
    assert sent.speculative == config.speculative
    assert isinstance(sent.speculative, SpeculativeConfig)
    assert sent.speculative.num_speculative_tokens == 2
    assert json.loads(msgspec.json.encode(config))["speculative"]["method"] == "suffix"


def test_synthetic_rates_are_those_of_whole_beginnings() -> None:
    synthetic = SyntheticAcceptance([0.8, 0.4, 0.4], 100)
    rows = np.zeros(4, np.int64)
    accepted: Counter[int] = Counter()
    rng = random.Random(0)
    for _ in range(2000):
        tokens = np.array([rng.randrange(3, 6) for _ in range(4)])
        synthetic.apply(Samples(rows, rows, rows, {0: (0, (3, 4, 5))}), tokens, lambda row: True)
        accepted[next((i for i, guess in enumerate((3, 4, 5)) if tokens[i] != guess), 3)] += 1
    at_least = [sum(accepted[n] for n in range(i, 4)) / 2000 for i in (1, 2, 3)]
    assert at_least == pytest.approx([0.8, 0.4, 0.4], abs=0.04)


def test_an_engine_accepts_at_synthetic_rates(model: Path) -> None:
    rates = {"method": "suffix", "synthetic_acceptance_rates": [1.0, 1.0, 0.0]}
    core = EngineCore(config_of(model, speculative_config=rates))
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    core.add(EngineRequest("r", Prompt([5, 6, 7, 8] * 3), params, [EOS], 30, 0.0))
    num_drafts, accepted = 0, [0, 0]
    while core.has_work:
        stats = core.step().stats
        num_drafts += stats.num_drafts
        accepted = [a + b for a, b in zip(accepted, [*stats.num_accepted_by_position, 0, 0], strict=False)]
        assert len(stats.num_accepted_by_position) <= 2
    assert num_drafts > 3
    assert accepted[0] == num_drafts
