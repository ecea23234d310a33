"""A draft model: how often it guesses right, and how much faster a stream is for it.

    python benchmarks/draft_model.py acceptance TARGET DRAFT [--draft-quantization int4]
    python benchmarks/draft_model.py speed TARGET DRAFT --load-format dummy --quantization int8

`acceptance` counts the guesses that stand at temperatures 0, 0.7 and 1: with the random numbers that the model draws
with, and with numbers of the draft's own. `speed` times one stream without and with a draft of 4 guesses, each accepted
with a chance of 0.8 where those before it are, and the steps that both are made of: from these follows the limit.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import Any

from octavo.config import EngineArgs, EngineConfig
from octavo.engine.core import EngineCore
from octavo.execution import model_drafter
from octavo.loading.tokenizer import load_tokenizer
from octavo.request import EngineRequest, Prompt
from octavo.sampling_params import SamplingParams
from octavo.speculative.proposer import ToBeDrafted
from octavo.speculative.speculation import Speculation
from octavo.step_plan import StepPlan

_NUM_GUESSES = 4
_CHANCE = 0.8
_QUESTIONS = (
    "Explain how a bicycle stays upright.", "Write a short story about a lighthouse keeper.",
    "Why is the sky blue?", "Write a Python function that sorts a list of names.",
    "Summarize the causes of the first world war.", "Give me a recipe for tomato soup.",
    "How do vaccines work?", "Describe the water cycle to a child.",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("what", choices=["acceptance", "speed"])
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("--quantization")
    parser.add_argument("--draft-quantization")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    (_acceptance if args.what == "acceptance" else _speed)(args)


def _config(args: argparse.Namespace, **flags: Any) -> EngineConfig:
    defaults = {"max_model_len": 1024, "max_num_seqs": 8, "num_gpu_blocks_override": 300, "seed": 0}
    return EngineArgs(model=args.target, load_format=args.load_format, **(defaults | flags)).create_engine_config()


def _core(args: argparse.Namespace, **flags: Any) -> EngineCore:
    """That always guesses as many as it may."""
    return EngineCore(_config(args, **flags), None, Speculation(ToBeDrafted(1024), _NUM_GUESSES))


def _acceptance(args: argparse.Namespace) -> None:
    speculative = {"model": args.draft, "num_speculative_tokens": _NUM_GUESSES, "quantization": args.draft_quantization}
    core = _core(args, quantization=args.quantization, speculative_config=speculative)
    tokenizer = load_tokenizer(EngineArgs(model=args.target).create_engine_config().model.checkpoint)
    prompts = [
        list(
            tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)["input_ids"]
        )
        for text in _QUESTIONS
    ]
    common = model_drafter.changes_of

    def independent(*of_plan: Any) -> StepPlan:
        plan = common(*of_plan)
        return replace(plan, admissions=[replace(one, seed=one.seed ^ 0x5EED) for one in plan.admissions])

    print(f"{'temperature':>12} {'numbers':>12} {'first guess':>12} {'tokens a step':>14}")
    for temperature in (0.0, 0.7, 1.0):
        for name, changes in (("the model's", common), ("its own", independent)):
            if temperature == 0 and changes is independent:
                continue
            model_drafter.changes_of = changes
            for i, prompt in enumerate(prompts):
                params = SamplingParams(temperature=temperature, seed=i, max_tokens=args.tokens)
                core.add(EngineRequest(f"r{i}", Prompt(prompt), params, [], args.tokens, 0.0))
            drafts = accepted = first = 0
            while core.has_work:
                stats = core.step().stats
                drafts, accepted = drafts + stats.num_drafts, accepted + stats.num_accepted_tokens
                first += (stats.num_accepted_by_position or [0])[0]
            print(f"{temperature:>12} {name:>12} {first / drafts:>12.3f} {1 + accepted / drafts:>14.2f}", flush=True)
    model_drafter.changes_of = common


def _speed(args: argparse.Namespace) -> None:
    rates = [_CHANCE ** (i + 1) for i in range(_NUM_GUESSES)]
    speculative = {
        "model": args.draft, "num_speculative_tokens": _NUM_GUESSES, "quantization": args.draft_quantization,
        "synthetic_acceptance_rates": rates,
    }  # fmt: skip
    drafted = _core(args, quantization=args.quantization, speculative_config=speculative)
    plain = EngineCore(_config(args, quantization=args.quantization), drafted.executor)
    for core in (plain, drafted):
        _stream_s(core, args.tokens)  # memory is touched
    plain_s, (drafted_s, num_steps, draft_s) = _stream_s(plain, args.tokens)[0], _stream_s(drafted, args.tokens)
    one_s, step_s = plain_s / args.tokens, (drafted_s - draft_s) / num_steps
    guess_s = draft_s / num_steps / _NUM_GUESSES
    expected = 1 + sum(rates)
    print(f"without: {args.tokens / plain_s:.1f} tokens/s, {one_s * 1e3:.1f} ms a step")
    print(f"with:    {args.tokens / drafted_s:.1f} tokens/s, {plain_s / drafted_s:.2f} times as many")
    print(f"a step that verifies {_NUM_GUESSES}: {step_s * 1e3:.1f} ms; a guess: {guess_s * 1e3:.1f} ms")
    print(f"tokens a step: {args.tokens / num_steps:.2f}, {expected:.2f} expected")
    print(f"limit of these costs: {expected * one_s / (step_s + _NUM_GUESSES * guess_s):.2f} times")
    print(f"limit if a step that verifies took no longer than one of a token: {_bound(one_s, guess_s, expected):.2f}")


def _bound(one_s: float, guess_s: float, expected: float) -> float:
    return expected * one_s / (one_s + _NUM_GUESSES * guess_s)


def _stream_s(core: EngineCore, num_tokens: int) -> tuple[float, int, float]:
    """Seconds of one stream after its first token, its steps, and the seconds that guessing took."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens + 1, ignore_eos=True)
    core.add(EngineRequest("r", Prompt(list(range(100, 164))), params, [], num_tokens + 1, 0.0))
    apply_result, draft_s = core.scheduler.apply_result, 0.0

    def watched(plan: Any, result: Any) -> Any:
        nonlocal draft_s
        draft_s += result.draft_s
        return apply_result(plan, result)

    core.scheduler.apply_result = watched  # type: ignore[method-assign]
    core.step()
    draft_s, num_steps, begin = 0.0, 0, time.perf_counter()
    while core.has_work:
        core.step()
        num_steps += 1
    core.scheduler.apply_result = apply_result  # type: ignore[method-assign]
    return time.perf_counter() - begin, num_steps, draft_s


if __name__ == "__main__":
    main()
