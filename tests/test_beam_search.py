"""`LLM.beam_search` against `transformers`' own, with the default model in float32, and under pressure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.errors import RequestError
from octavo.sampling_params import BeamSearchParams
from tests.untimed import without_time

PROMPTS = [
    "The capital of France is",
    "Once upon a time, there was a",
    "Two plus two is",
    "<|im_start|>user\nSay yes or no.<|im_end|>\n<|im_start|>assistant\n",
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    llm = LLM(dtype="float32", max_model_len=256, num_gpu_blocks_override=128, check_invariants=True)
    yield llm
    assert llm.core.scheduler.cache.pools[0].num_used == 0, "blocks are in use when idle"


@pytest.fixture(scope="module")
def reference() -> Any:
    """The same weights in `transformers`."""
    from transformers import AutoModelForCausalLM

    from octavo.loading.checkpoint import resolve

    path = resolve("").path
    folder, _, name = path.rpartition("/")
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).eval()


def expected(reference: Any, llm: LLM, prompt: str, **options: Any) -> list[list[int]]:
    """Output tokens of `transformers`' answers, best first."""
    ids = torch.tensor([llm.tokenizer(prompt).input_ids])
    found = reference.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, num_return_sequences=options["num_beams"],
        eos_token_id=llm.inputs.eos_token_ids, pad_token_id=0,
        top_p=None, top_k=None, temperature=None, **options,
    )  # fmt: skip
    ends = set(llm.inputs.eos_token_ids)
    results = []
    for output in found[:, ids.shape[1] :].tolist():
        length = next((i + 1 for i, token in enumerate(output) if token in ends), len(output))
        results.append(output[:length])
    return results


def logprob(reference: Any, llm: LLM, prompt: str, output: list[int]) -> float:
    """Of `output` after `prompt`, by the reference's logits.

    The scores that its own search returns are 1e-5 a token too large: its float32 log-softmax rounds so much.
    """
    ids = llm.tokenizer(prompt).input_ids
    with torch.no_grad():
        logits = reference(torch.tensor([ids + output])).logits[0, len(ids) - 1 : -1]
    return float(logits.double().log_softmax(-1)[range(len(output)), output].sum())


@pytest.mark.long
@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize(
    ("num_beams", "length_penalty", "early_stopping"),
    [(4, 1.0, False), (3, 0.0, "never"), (2, 2.0, True), (1, 1.0, False)],
)
def test_answers_and_scores_are_those_of_transformers(
    llm: LLM, reference: Any, prompt: str, num_beams: int, length_penalty: float, early_stopping: bool | str
) -> None:
    if num_beams == 1:
        wanted = None
    else:
        wanted = expected(
            reference, llm, prompt, num_beams=num_beams, length_penalty=length_penalty,
            early_stopping=early_stopping, max_new_tokens=16,
        )  # fmt: skip
    params = SamplingParams(
        use_beam_search=True, n=num_beams, temperature=0, max_tokens=16, length_penalty=length_penalty,
        early_stopping=early_stopping,
    )  # fmt: skip
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    if wanted is None:  # one beam is greedy
        (greedy,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)
        assert output.outputs[0].token_ids == greedy.outputs[0].token_ids
        return
    assert [completion.token_ids for completion in output.outputs] == wanted
    for completion, tokens in zip(output.outputs, wanted, strict=True):
        assert completion.cumulative_logprob == pytest.approx(logprob(reference, llm, prompt, tokens), abs=2e-4)


@pytest.mark.slow
@pytest.mark.long
def test_processed_scores_are_searched_as_by_transformers(llm: LLM, reference: Any) -> None:
    """Penalties and masks come after the log-probabilities, in both."""
    options = {"repetition_penalty": 1.3, "min_new_tokens": 6}
    wanted = expected(reference, llm, PROMPTS[3], num_beams=3, max_new_tokens=10, **options)
    params = SamplingParams(
        use_beam_search=True, n=3, temperature=0, max_tokens=10, repetition_penalty=1.3, min_tokens=6
    )
    (output,) = llm.generate(PROMPTS[3], params, use_tqdm=False)
    assert [completion.token_ids for completion in output.outputs] == wanted


@pytest.mark.long
def test_beam_search_returns_vllms_classes(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=5)
    first, second = llm.beam_search([{"prompt": PROMPTS[0]}, {"prompt": PROMPTS[2]}], params)
    by_one = llm.beam_search([{"prompt": PROMPTS[0]}, {"prompt": PROMPTS[2]}], params, None, concurrency_limit=1)
    assert by_one == [first, second]
    assert len(first.sequences) == len(second.sequences) == 3
    best = first.sequences[0]
    assert best.text.startswith("The capital of France is Paris")
    prompt_ids = llm.tokenizer(PROMPTS[0]).input_ids
    assert best.tokens[: len(prompt_ids)] == prompt_ids
    assert best.text == llm.tokenizer.decode(best.tokens)
    chosen = [position[token].logprob for token, position in zip(best.tokens[len(prompt_ids) :], best.logprobs)]  # noqa: B905
    if best.finish_reason == "length":
        assert sum(chosen) == pytest.approx(best.cum_logprob)
    assert all(len(position) >= 6 for position in best.logprobs)
    scores = [sequence.score for sequence in first.sequences]
    assert scores == sorted(scores, reverse=True)


def test_the_token_that_ends_an_answer_is_shown_only_when_asked(llm: LLM) -> None:
    prompt = PROMPTS[3]
    for included in (False, True):
        params = BeamSearchParams(beam_width=2, max_tokens=40, include_stop_str_in_output=included)
        (output,) = llm.beam_search([prompt], params)
        ended = [sequence for sequence in output.sequences if sequence.finish_reason == "stop"]
        assert ended
        assert all((sequence.tokens[-1] in llm.inputs.eos_token_ids) is included for sequence in ended)


@pytest.mark.long
def test_searches_answer_the_same_among_others_and_when_blocks_run_out() -> None:
    params = SamplingParams(use_beam_search=True, n=2, best_of=4, temperature=0, max_tokens=24, ignore_eos=True)
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    prompts = [f"Number {i}. {PROMPTS[i % 3]}" for i in range(6)]
    roomy = LLM(max_model_len=128, num_gpu_blocks_override=400)
    alone = [roomy.generate(prompt, params, use_tqdm=False)[0] for prompt in prompts]
    for options in ({}, {"preemption_mode": "swap", "swap_space": 0.05}, {"max_num_batched_tokens": 16}):
        tight = LLM(max_model_len=128, num_gpu_blocks_override=16, max_num_seqs=12, check_invariants=True, **options)  # type: ignore[arg-type]
        without_time(tight.core)  # type: ignore[arg-type]
        both = tight.generate([*prompts, *prompts], [params] * 6 + [greedy] * 6, use_tqdm=False)
        assert [[c.token_ids for c in output.outputs] for output in both[:6]] == [
            [c.token_ids for c in output.outputs] for output in alone
        ]
        assert sum(output.metrics.num_preemptions for output in both if output.metrics) > 0
        assert tight.core.scheduler.cache.pools[0].num_used == 0


def test_a_temperature_scales_the_scores(llm: LLM) -> None:
    def total(temperature: float) -> float:
        params = SamplingParams(use_beam_search=True, n=2, temperature=temperature, max_tokens=4)
        value = llm.generate(PROMPTS[1], params, use_tqdm=False)[0].outputs[0].cumulative_logprob
        assert value is not None
        return value

    assert total(0) == total(1)
    assert total(0.5) > total(1) > total(2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"length_penalty": 2.0}, "length_penalty must be 1.0 without use_beam_search"),
        ({"early_stopping": True}, "early_stopping must be False without use_beam_search"),
        ({"use_beam_search": True, "early_stopping": "soon"}, 'early_stopping must be true, false or "never"'),
        ({"use_beam_search": True, "early_stopping": 1}, 'early_stopping must be true, false or "never"'),
        ({"use_beam_search": 1}, "use_beam_search must be true or false"),
        ({"use_beam_search": True, "length_penalty": 1e9}, "length_penalty must be between -10 and 10"),
        ({"use_beam_search": True, "stop": ["x"]}, "stop must be left out with use_beam_search"),
        ({"use_beam_search": True, "top_p": 0.9}, "top_p must be left out with use_beam_search"),
        ({"use_beam_search": True, "top_k": 5}, "top_k must be left out with use_beam_search"),
        ({"use_beam_search": True, "min_p": 0.1}, "min_p must be left out with use_beam_search"),
    ],
)
def test_what_a_search_cannot_honour_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**fields)


def test_a_width_out_of_range_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="beam_width must be between 1 and 128, got 0"):
        llm.beam_search(["a"], BeamSearchParams(beam_width=0, max_tokens=5))
    with pytest.raises(RequestError, match="concurrency_limit must be 1 or more, got 0"):
        llm.beam_search(["a"], BeamSearchParams(beam_width=1, max_tokens=5), concurrency_limit=0)
    with pytest.raises(RequestError, match="beams of up to 250 tokens need 480 blocks"):
        llm.beam_search(["a"], BeamSearchParams(beam_width=30, max_tokens=250))
