"""What guesses bring, and what they cost where there is nothing to guess: one engine, with and without in turns.

    python benchmarks/speculation.py            # all parts, some minutes on two cores
    python benchmarks/speculation.py default    # what is on without flags, over kinds of text, for one stream and four
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
from octavo.speculative_config import DEFAULT, parse

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
        speculative = None if method in (None, "off", "default") else parse({"method": method, **settings})
        if method == "default":
            speculative = DEFAULT
        core = EngineCore(replace(self.config, speculative=speculative), self._executor, draft_tokens)
        if method == "off":
            core.scheduler._speculation = None
        return core

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def request(
        self, prompt: list[int], prediction: list[int], temperature: float, num_output: int, ends: bool = False
    ) -> EngineRequest:
        """An answer of `num_output` tokens, or of fewer if it `ends` before."""
        self._num_requests += 1
        params = SamplingParams(temperature=temperature, max_tokens=num_output, ignore_eos=not ends, seed=1)
        end = self.tokenizer.backend_tokenizer.token_to_id("<|im_end|>") if ends else 0
        return EngineRequest(
            f"r{self._num_requests}", Prompt(prompt), params, [end], num_output, 0.0, prediction=prediction
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
        self.num_tokens = sum(map(len, self.tokens.values())) - num_before


class Round:
    """The runs of some requests, `num_streams` at once."""

    def __init__(self, core: EngineCore, requests: list[EngineRequest], num_streams: int) -> None:
        core.reset_prefix_cache()  # the cores of an executor have one memory
        runs = [Run(core, requests[i : i + num_streams]) for i in range(0, len(requests), num_streams)]
        self.tokens = {name: tokens for run in runs for name, tokens in run.tokens.items()}
        self.num_steps = sum(run.num_steps for run in runs)
        self.num_drafted = sum(run.num_drafted for run in runs)
        self.num_accepted = sum(run.num_accepted for run in runs)
        self.tokens_per_s = sum(run.num_tokens for run in runs) / sum(run.seconds for run in runs)


def compare(
    name: str, cores: dict[str, EngineCore], make: Callable[[str], list[EngineRequest]], num_rounds: int,
    num_streams: int = 64,
) -> None:  # fmt: skip
    """Rounds of each core in turns; `make` is called with a core's name and makes its requests."""
    runs: dict[str, list[Round]] = {label: [] for label in cores}
    for _ in range(num_rounds + 1):  # the first one warms up
        for label, core in cores.items():
            runs[label].append(Round(core, make(label), num_streams))
    first = next(iter(runs))
    for label, found in runs.items():
        measured = found[1:]
        answers = [list(run.tokens.values()) for run in found]
        assert all(answer == list(runs[first][0].tokens.values()) for answer in answers), "answers differ"
        rates = [run.tokens_per_s for run in measured]
        ratios = [run.tokens_per_s / base.tokens_per_s for run, base in zip(measured, runs[first][1:], strict=True)]
        last = measured[-1]
        print(
            f"{name:>12}  {label:>11}  {median(rates):7.1f} tok/s  ratio {median(ratios):5.3f} ({min(ratios):5.3f} to "
            f"{max(ratios):5.3f})  steps {last.num_steps}  guessed {last.num_drafted}  accepted {last.num_accepted}  "
            f"first {found[0].tokens_per_s:.1f} tok/s",
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


_CODE = """\
import json
from dataclasses import dataclass


@dataclass
class Order:
    number: int
    customer: str
    items: list[str]
    total: float


def load_orders(path):
    with open(path) as file:
        return [Order(**entry) for entry in json.load(file)]


def total_of(orders, customer):
    total = 0.0
    for order in orders:
        if order.customer == customer:
            total += order.total
    return total


def largest(orders):
    return max(orders, key=lambda order: order.total)
"""
_LETTER = """\
Dear Sir or Madam, my name is Margaret Ellison and I live at 14 Harbour Street, Whitby. On 3 March 2024 I ordered a
walnut writing desk, order number WD-20931, for 489.50 pounds, and two brass reading lamps, order number BL-77120, for
64.00 pounds each. The desk came on 19 March with a broken drawer, and the lamps have not come at all. I have written
twice to your colleague Thomas Birkbeck, who promised a new drawer by 1 April. Please call me at 01947 555 0182 or
write to margaret.ellison@example.com. Yours faithfully, Margaret Ellison"""


def kinds() -> dict[str, tuple[float, str, list[str]]]:
    """By kind of text: the temperature, how answers begin, and what four users ask."""
    pages = TEXT.read_text(encoding="utf-8")
    parts = [pages[i : i + 1800] for i in range(0, 7200, 1800)]
    code, letter = f"\n\n```python\n{_CODE}```", f"\n\n{_LETTER}"
    return {
        "chat": (
            0.7, "",
            [
                "How do I keep bread fresh for a week?", "Tell me about the history of lighthouses.",
                "What should I see in Lisbon in two days?", "Explain to a child why the sky is blue.",
            ],
        ),
        "code edit": (
            0.0, "```python\nimport json\n",
            [
                f"Rename the class Order to Purchase and give back the whole file.{code}",
                f"Add a docstring to each function and give back the whole file.{code}",
                f"Rename the function largest to most_expensive and give back the whole file.{code}",
                f"Add type hints to each function and give back the whole file.{code}",
            ],
        ),
        "JSON": (
            0.0, '```json\n{\n  "customer": "',
            [
                f"Give {what} in this letter as JSON, word for word as they stand there.{letter}"
                for what in ("names and addresses", "orders with number and price", "dates and what happened then",
                             "all facts")
            ],
        ),
        "summary": (0.0, "", [f"Summarize this text in five sentences.\n\n{part}" for part in parts]),
        "sampled": (1.0, "", ["Write a story.", "Write a poem.", "Write a letter.", "Write a dialogue."]),
    }  # fmt: skip


def default(engine: Engine) -> None:
    """Kinds of text as users ask for them. What is sampled at temperature 1 repeats the least."""
    for name, (temperature, begun, asked) in kinds().items():
        chats = [f"<|im_start|>user\n{one}<|im_end|>\n<|im_start|>assistant\n{begun}" for one in asked]
        prompts = [engine.encode(chat) for chat in chats]
        for num_streams in (1, 4):
            cores = {label: engine.core(label) for label in ("off", "default")}
            compare(
                f"{name}, {num_streams}", cores,
                lambda label, prompts=prompts, heat=temperature: [
                    engine.request(prompt, [], heat, NUM_OUTPUT, ends=True) for prompt in prompts
                ], 5, num_streams,
            )  # fmt: skip


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


PARTS = {"default": default, "quote": quote, "edit": edit, "plain": plain, "rows": rows}


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
