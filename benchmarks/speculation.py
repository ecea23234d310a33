"""What guesses bring, and what they cost where there is nothing to guess: one engine, with and without in turns.

    python benchmarks/speculation.py            # all parts, about a minute and a half on two cores
    python benchmarks/speculation.py quote edit # answers that copy from their prompts, edits of a predicted file
    python benchmarks/speculation.py plain      # text that repeats nothing, at 1, 16 and 64 streams
    python benchmarks/speculation.py rows       # a step of one stream that verifies guesses, by their number

Times are those of decoding, from the first token to the last, of the median round; a ratio is of two such times.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np

from octavo.config import EngineArgs, EngineConfig
from octavo.engine.core import EngineCore
from octavo.execution.executor import LocalExecutor
from octavo.loading.tokenizer import ModelTokenizer, load_tokenizer
from octavo.request import EngineRequest, Prompt
from octavo.sampling_params import SamplingParams
from octavo.sequence import Sequence
from octavo.speculative.proposer import Proposal
from octavo.speculative.speculation import Speculation
from octavo.speculative_config import parse

TEXT = Path(__file__).parent / "data" / "perplexity.txt"
NUM_OUTPUT = 256


class Engine:
    """A model, and cores that guess in different ways."""

    def __init__(self, model: str) -> None:
        self.config: EngineConfig = EngineArgs(model=model, max_model_len=4096, max_num_seqs=64).create_engine_config()
        self.tokenizer: ModelTokenizer = load_tokenizer(self.config.model.checkpoint)
        self._executor = LocalExecutor(self.config)
        self._num_requests = 0

    def core(self, method: str | None, draft_tokens: Speculation | None = None, **settings: int) -> EngineCore:
        """Without a method only predictions are guessed, and with "off" nothing is."""
        speculative = None if method in (None, "off") else parse({"method": method, **settings})
        core = EngineCore(replace(self.config, speculative=speculative), self._executor, draft_tokens)
        if method == "off":
            core.scheduler._speculation = None
        return core

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def request(self, prompt: list[int], prediction: list[int], temperature: float, num_output: int) -> EngineRequest:
        self._num_requests += 1
        params = SamplingParams(temperature=temperature, max_tokens=num_output, ignore_eos=True, seed=1)
        return EngineRequest(
            f"r{self._num_requests}", Prompt(prompt), params, [0], num_output, 0.0, prediction=prediction
        )


class Run:
    """What one round of requests was answered, and how long it took."""

    def __init__(self, core: EngineCore, requests: list[EngineRequest]) -> None:
        for request in requests:
            core.add(request)
        self.tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
        self.num_drafted = self.num_accepted = self.num_steps = 0
        self.step_s: list[float] = []
        begin = 0.0
        while core.has_work:
            start = time.perf_counter()
            stepped = core.step()
            now = time.perf_counter()
            self.step_s.append(now - start)
            self.num_steps += 1
            self.num_drafted += stepped.stats.num_draft_tokens
            self.num_accepted += stepped.stats.num_accepted_tokens
            for output in stepped.outputs:
                self.tokens[output.request_id] += output.token_ids
            if not begin and all(self.tokens.values()):  # all prompts are computed
                begin, num_before = now, sum(map(len, self.tokens.values()))
        self.seconds = time.perf_counter() - begin
        self.tokens_per_s = (sum(map(len, self.tokens.values())) - num_before) / self.seconds


def compare(
    name: str, cores: dict[str, EngineCore], make: Callable[[str], list[EngineRequest]], num_rounds: int
) -> None:
    """Rounds of each core in turns; `make` is called with a core's name and makes its requests."""
    runs: dict[str, list[Run]] = {label: [] for label in cores}
    for _ in range(num_rounds + 1):  # the first one warms up
        for label, core in cores.items():
            runs[label].append(Run(core, make(label)))
    first = next(iter(runs))
    for label, found in runs.items():
        measured = found[1:]
        answers = [list(run.tokens.values()) for run in found]
        assert all(answer == list(runs[first][0].tokens.values()) for answer in answers), "answers differ"
        rates = [run.tokens_per_s for run in measured]
        ratios = [run.tokens_per_s / base.tokens_per_s for run, base in zip(measured, runs[first][1:], strict=True)]
        last = measured[-1]
        print(
            f"{name:>10}  {label:>11}  {median(rates):7.1f} tok/s  ratio {median(ratios):5.3f}  steps {last.num_steps}"
            f"  guessed {last.num_drafted}  accepted {last.num_accepted}  first {found[0].tokens_per_s:.1f} tok/s",
            flush=True,
        )


def quote(engine: Engine) -> None:
    """A text of 1,450 tokens, and an answer that quotes it."""
    text = engine.encode(TEXT.read_text(encoding="utf-8"))[:1450]
    prompt = [*text, *engine.encode("\n\nThe same text again, word for word:\n\n"), *text[:16]]
    cores = {"off": engine.core("off"), "ngram": engine.core("ngram")}
    # Rounds are alike: without recent answers each is as the first one, with them all others are as one asked again.
    cores["suffix"] = engine.core("suffix", suffix_decoding_max_cached_requests=0)
    cores["again"] = engine.core("suffix")
    compare("quote", cores, lambda label: [engine.request(prompt, [], 0.0, NUM_OUTPUT)], 7)


def edit(engine: Engine) -> None:
    """A file of which some lines change, and which is predicted not to."""
    names = ["width", "height", "depth", "weight", "price", "colour", "title", "author", "place", "number"]
    lines = ["class Thing:", '    """A thing of the shop."""', ""]
    for name in names:
        lines += [f"    def get_{name}(self):", f'        """The {name} of it."""', f"        return self._{name}", ""]
    before = "\n".join(lines)
    after = before.replace("price", "cost")
    examples = "".join(
        f"# {old} becomes {new}\n# Before:\ndef get_{old}(self):\n    return self._{old}\n# After:\n"
        f"def get_{new}(self):\n    return self._{new}\n\n"
        for old, new in (("size", "extent"), ("owner", "holder"))
    )
    text = f"{examples}# price becomes cost\n# Before:\n{before}\n# After:\n"
    cores = {"off": engine.core("off"), "prediction": engine.core(None)}
    prediction = engine.encode(before)
    num_output = len(engine.encode(after))

    def make(label: str) -> list[EngineRequest]:
        return [engine.request(engine.encode(text), [] if label == "off" else prediction, 0.0, num_output)]

    compare("edit", cores, make, 7)
    run = Run(engine.core("off"), make("off"))
    answer = engine.tokenizer.decode(next(iter(run.tokens.values())))
    same = sum(a == b for a, b in zip(answer.splitlines(), after.splitlines(), strict=False))
    print(f"            {same} of {len(after.splitlines())} lines are as the edit should have made them")


def plain(engine: Engine) -> None:
    """Prompts of words at random, and answers at temperature 1: nothing repeats, and ngram finds nothing."""
    rng = np.random.default_rng(0)
    for num, num_output, num_rounds in ((1, 160, 5), (16, 64, 5), (64, 32, 5)):
        prompts = [rng.integers(1000, 30_000, 32).tolist() for _ in range(num)]
        cores = {"off": engine.core("off"), "ngram": engine.core("ngram"), "off again": engine.core("off")}
        compare(
            f"plain {num}", cores,
            lambda label, prompts=prompts, n=num_output: [engine.request(p, [], 1.0, n) for p in prompts], num_rounds,
        )  # fmt: skip


class _Known:
    """Guesses what it was told, and no more than `most` tokens of it."""

    def __init__(self, answer: list[int]) -> None:
        self.answer, self.most = answer, 0

    def start(self, seq: Sequence) -> None:
        """Nothing is kept."""

    def propose(self, seq: Sequence, state: None, most: int) -> Proposal:
        begin = seq.num_output_tokens
        return Proposal(tuple(self.answer[begin : begin + min(most, self.most)]))

    def end(self, seq: Sequence, state: None) -> None:
        """Nothing was kept."""


def rows(engine: Engine) -> None:
    """Steps of one stream whose guesses are right."""
    rng = np.random.default_rng(0)
    for num_prompt in (100, 1500):
        prompt = rng.integers(1000, 30_000, num_prompt).tolist()
        off = Run(engine.core("off"), [engine.request(prompt, [], 0.0, 192)])
        known = _Known(next(iter(off.tokens.values())))
        core = engine.core(None, Speculation(known, 64))
        alone = median(off.step_s[1:])
        for count in (0, 1, 2, 3, 5, 7, 11, 15):
            known.most = count
            found = median(Run(core, [engine.request(prompt, [], 0.0, 192)]).step_s[1:-1])
            print(
                f"{num_prompt} keys, 1 + {count:2} rows: {1e3 * found:6.2f} ms, {found / alone:4.2f} steps of one row, "
                f"{(1 + count) * alone / found:4.2f} times the tokens",
                flush=True,
            )


PARTS = {"quote": quote, "edit": edit, "plain": plain, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], default=[])
    parser.add_argument("--model", default="", help="Default: SmolLM2-135M-Instruct.")
    args = parser.parse_args()
    engine = Engine(args.model)
    for part in args.parts or PARTS:
        PARTS[part](engine)


if __name__ == "__main__":
    main()
