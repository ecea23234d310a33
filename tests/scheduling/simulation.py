"""A scheduler and its cache on a simulated device, and a model of the truth to compare them with.

A slot of the simulated memory holds one number that stands for the key and the value of a token: a hash over that token
and over the number that *the device itself* finds, through the block table, in the slot before. It therefore depends on
every earlier token, as attention does, and a block that was overwritten, copied too late, swapped wrongly or taken from
another sequence shows in all that is computed from it. The next token is drawn from the last of these numbers.

Operations are `add`, `abort`, `abort_one` and `step`. Each one checks the scheduler's own invariants, and a step checks
the rest: the memory of every sequence, the budgets, progress, and each finished sequence against `standalone`.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from octavo.execution.step_batch import SequenceTable

from octavo.config import SchedulerConfig
from octavo.kv_cache.manager import KVCacheManager
from octavo.plan import Admission, StepPlan, StepResult
from octavo.request import EngineRequest, Prompt, SequenceOutput, TokenLogprobs
from octavo.sampling_params import SamplingParams
from octavo.scheduling.scheduler import Scheduler
from octavo.sequence import Sequence
from octavo.stats import EngineStats

VOCAB_SIZE = 48
EOS = 0
FAILURE = "a logits processor failed"


@dataclass(frozen=True)
class Setup:
    """A scheduler's configuration and the memory under it."""

    num_blocks: int = 24
    block_size: int = 4
    num_host_blocks: int = 8
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 24
    policy: str = "fcfs"
    preemption_mode: str = "recompute"
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    runs_ahead: bool = False  # steps are planned before the results of the last one are known
    memory_failures: int = 0  # percent of the steps that the device has no memory for

    @property
    def max_model_len(self) -> int:
        """The longest request that both the memory and, without chunked prefill, one step can hold."""
        capacity = self.num_blocks * self.block_size
        return capacity if self.enable_chunked_prefill else min(capacity, self.max_num_batched_tokens)


@dataclass(frozen=True)
class Expected:
    """What a sequence must put out, whatever else runs."""

    token_ids: list[int]
    finish_reason: str
    stop_reason: int | None


@dataclass
class Watched:
    """A request as the test follows it."""

    request: EngineRequest
    fails_at: int | None  # output tokens before a logits processor fails
    deadline: int | None  # the step by which it must have finished
    outputs: dict[int, list[int]] = field(default_factory=dict)  # tokens so far, by sequence
    expected: dict[int, Expected] = field(default_factory=dict)  # by sequence, once it has put out a token
    live: set[int] = field(default_factory=set)  # sequences that the test has neither seen finish nor aborted

    @property
    def has_started(self) -> bool:
        return bool(self.outputs)

    @property
    def num_most_steps(self) -> int:
        """Steps that it can take alone, at a token each. Beams may all have to be computed anew for each token."""
        num_tokens = len(self.request.prompt.token_ids) + self.request.max_tokens
        if self.request.params.use_beam_search:
            return self.request.params.num_sequences * self.request.max_tokens * num_tokens
        return len(self.live) * num_tokens


class Simulation:
    """The operations, and what was found out while they ran."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.cache = KVCacheManager(
            setup.num_blocks, setup.block_size, setup.num_host_blocks, setup.enable_prefix_caching
        )
        config = SchedulerConfig(
            max_num_seqs=setup.max_num_seqs,
            max_num_batched_tokens=setup.max_num_batched_tokens,
            enable_chunked_prefill=setup.enable_chunked_prefill,
            policy=setup.policy,
            preemption_mode=setup.preemption_mode,
        )
        self.scheduler = Scheduler(config, self.cache, runs_ahead=setup.runs_ahead)
        self.device = Device(self)
        self.under_way: deque[tuple[StepPlan, StepResult]] = deque()
        self._failures = random.Random(5)
        self.requests: dict[str, Watched] = {}
        self.num_operations = 0
        self.num_steps = 0
        self.seen: Counter[str] = Counter()  # what the workload exercised
        self.num_requests = 0
        self._contents: dict[bytes, list[int]] = {}  # of every block that was ever indexed, by its key

    def add(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        fails_at: int | None = None,
    ) -> str:
        """Queue a request that can run. Returns its id."""
        assert params.max_tokens is not None
        request_id = f"request-{self.num_requests}"
        self.num_requests += 1
        request = EngineRequest(
            request_id=request_id,
            prompt=Prompt(prompt_token_ids, cache_salt=cache_salt),
            params=params,
            eos_token_ids=[EOS],
            max_tokens=params.max_tokens,
            arrival_time=0.0,
            priority=priority,
        )
        watched = Watched(request, fails_at, None, live=set(range(params.num_completions)))
        self.requests[request_id] = watched
        if self.setup.policy == "fcfs":
            # The oldest sequence computes at least one token in each step, so that this is the longest it can take.
            watched.deadline = self.num_steps + 2 * self.setup.runs_ahead
            watched.deadline += sum(other.num_most_steps for other in self.requests.values())
            if self.setup.memory_failures:  # each is a step for nothing
                watched.deadline = None
        self.scheduler.add(request)
        self._count("add")
        return request_id

    def abort(self, request_id: str) -> None:
        watched = self.requests.pop(request_id)
        for seq in self._sequences(watched):
            self.seen[
                "abort swapped" if seq.host_blocks else "abort waiting" if seq.row is None else "abort running"
            ] += 1
        self.scheduler.abort(request_id)
        assert not self._sequences(watched), "an aborted request is still there"
        self._count("abort")

    def abort_one(self, request_id: str, index: int) -> None:
        """End one sequence. Before its request has put out a token that means nothing, unless it is the only one."""
        watched = self.requests[request_id]
        if watched.request.params.use_beam_search:
            self.seen["abort one beam"] += 1
        elif watched.has_started or watched.request.params.num_sequences == 1:
            watched.live.discard(index)
            self.seen["abort one of several"] += len(watched.live) > 0
        else:
            self.seen["abort an unborn fork"] += 1
        self.scheduler.abort(request_id, index)
        if not watched.live:
            del self.requests[request_id]
        self._count("abort one")

    def step(self) -> EngineStats:
        """Schedule, compute and account, and check everything that must hold of a step."""
        running_before = [
            seq for seq in self.scheduler.running
            if not seq.is_held and not (seq.num_awaited_tokens and seq.is_complete)
        ]  # fmt: skip
        held_before = [seq for seq in self.scheduler.live_sequences() if seq.is_held]
        plan = self.scheduler.schedule()
        self.seen["held beam"] += len(held_before)
        self.seen["held beam preempted"] += sum(seq.row is None for seq in held_before)
        self._check_plan(plan)
        rows = set(plan.rows)
        passed_over = [seq for seq in running_before if seq.row is None or seq.row not in rows]
        if not rows and self.under_way:
            passed_over = []  # nobody loses blocks before the results of the last step are known
        if plan.rows:
            result = self.device.execute(plan)
            if self._failures.randrange(100) < self.setup.memory_failures:
                self._withdraw(plan)
            else:
                self.under_way.append((plan, result))
        else:
            assert not self.scheduler.has_work or self.under_way, "requests wait and nothing runs"
            assert plan.moves.swap_in == plan.moves.swap_out == plan.moves.copy == []
        num_ahead = 1 if plan.rows and plan.runs_ahead else 0
        self.seen["ahead"] += num_ahead
        while len(self.under_way) > num_ahead:
            for output in self.scheduler.update(*self.under_way.popleft()):
                self._take(output)
        stats = self.scheduler.take_stats()
        assert stats.num_preemptions or not passed_over, "a running sequence got no token though none was preempted"
        self.seen["preemption"] += stats.num_preemptions
        self.seen["swap"] += bool(plan.moves.swap_out)
        self.seen["swap back"] += bool(plan.moves.swap_in)
        self.seen["copy on write"] += len(plan.moves.copy)
        self.seen["prefix hit"] += stats.num_prefix_hits
        self.seen["chunk of a prompt"] += plan.num_samples.count(0)
        self.num_steps += 1
        for watched in self.requests.values():
            assert watched.deadline is None or self.num_steps <= watched.deadline, (
                f"{watched.request.request_id} starves"
            )
        assert stats.num_slots_filled == self.num_filled_slots()
        assert stats.num_slots_allocated == self.cache.pool.num_used * self.setup.block_size
        self._count("step")
        self._check_index()
        return stats

    def drain(self) -> None:
        """Run until nothing is left, and see that nothing is."""
        limit = self.num_steps + 2 * self.setup.runs_ahead
        limit += sum(watched.num_most_steps for watched in self.requests.values())
        while self.scheduler.has_work or self.under_way:
            assert self.setup.memory_failures or self.num_steps <= limit, "the requests do not come to an end"
            self.step()
        assert not self.requests, "a request was forgotten"
        assert self.cache.pool.num_used == self.cache.host_pool.num_used == 0
        assert self.cache.pool.num_free == self.setup.num_blocks

    def num_filled_slots(self) -> int:
        size = self.setup.block_size
        filled: dict[int, int] = {}
        for seq in self.scheduler.running:
            for i, block in enumerate(seq.block_table):
                tokens = min(max(seq.num_computed_tokens - i * size, 0), size)
                filled[block] = max(filled.get(block, 0), tokens)
        return sum(filled.values())

    def _withdraw(self, plan: StepPlan) -> None:
        """The step failed for want of memory: its newest request ends, and nothing else is lost."""
        scheduled = {seq.row: seq for seq in self.scheduler.running}
        newest = max((scheduled[row] for row in plan.rows), key=lambda seq: (seq.key, seq.index))
        for output in self.scheduler.withdraw(plan, FAILURE):
            assert (output.request_id, output.finish_reason) == (newest.request.request_id, "error")
        del self.requests[newest.request.request_id]
        self.seen["withdrawn"] += 1

    def _take(self, output: SequenceOutput) -> None:
        """Compare what a sequence puts out with what it must."""
        watched = self.requests[output.request_id]
        is_search = watched.request.params.use_beam_search
        index = 0 if is_search and output.finish_reason == "error" else output.index
        assert index in watched.live, "a sequence that has ended puts out a token"
        is_first_of_request = not watched.has_started
        tokens = watched.outputs.setdefault(index, [])
        tokens += output.token_ids
        if index not in watched.expected:
            watched.expected |= searched(watched) if is_search else {index: standalone(watched, index)}
        expected = watched.expected[index]
        assert tokens == expected.token_ids[: len(tokens)], "the tokens are not those of a standalone run"
        prompt = watched.request.prompt.token_ids
        if output.finish_reason != "error":
            is_due = watched.request.params.prompt_logprobs is not None and is_first_of_request
            reported = [entry.token_ids for entry in output.prompt_logprobs or []]
            assert reported == ([[token] for token in prompt[1:]] if is_due else [])
            self.seen["prompt logprobs"] += is_due
        if output.finish_reason is None:
            assert len(tokens) < len(expected.token_ids) or expected.finish_reason == "error", "it goes on for too long"
            return
        assert (tokens, output.finish_reason, output.stop_reason) == (
            expected.token_ids,
            expected.finish_reason,
            expected.stop_reason,
        )
        self.seen[f"finish: {output.finish_reason}"] += 1
        self.seen["finish of a search"] += is_search
        watched.live.discard(index)
        if output.finish_reason == "error":
            assert output.error == FAILURE
            if not watched.outputs.keys() - {index} and not tokens:
                watched.live.clear()  # it failed before it forked
        if not watched.live:
            del self.requests[output.request_id]

    def _check_plan(self, plan: StepPlan) -> None:
        assert sum(plan.num_tokens) == plan.total_tokens <= self.setup.max_num_batched_tokens
        assert len(plan.rows) == len(set(plan.rows)) <= self.setup.max_num_seqs
        assert sum(seq.num_rows for seq in self.scheduler.running) <= self.setup.max_num_seqs
        assert all(count > 0 for count in plan.num_tokens)
        scheduled = {seq.row: seq for seq in self.scheduler.running}
        for row, computed, count, samples in zip(
            plan.rows, plan.num_computed, plan.num_tokens, plan.num_samples, strict=True
        ):
            seq = scheduled[row]
            assert computed + count == seq.num_computed_tokens
            num_tokens = seq.num_tokens - (samples if plan.runs_ahead else 0)
            is_complete = computed + count == num_tokens
            assert is_complete or self.setup.enable_chunked_prefill, "a prompt was cut though chunked prefill is off"
            assert samples == ((1 if seq.beam is not None else seq.num_rows) if is_complete else 0)

    def _check_index(self) -> None:
        """A block of the prefix index holds the same as when it was indexed; equal keys mean equal contents."""
        size = self.setup.block_size
        for block, key in enumerate(self.cache.pool.hashes):
            if key is not None:
                content = self.device.memory[block * size : (block + 1) * size]
                assert self._contents.setdefault(key, content) == content, "an indexed block was overwritten"

    def _sequences(self, watched: Watched) -> list[Sequence]:
        request_id = watched.request.request_id
        return [seq for seq in self.scheduler.live_sequences() if seq.request.request_id == request_id]

    def _count(self, operation: str) -> None:
        self.num_operations += 1
        self.seen[operation] += 1
        self.scheduler.check()


def standalone(watched: Watched, index: int) -> Expected:
    """The tokens of a sequence that runs alone on a device without blocks."""
    request, params = watched.request, watched.request.params
    state = root(request.prompt.cache_salt)
    for token in request.prompt.token_ids:
        state = advance(state, token)
    stops = [EOS, *params.stop_token_ids]
    output: list[int] = []
    while True:
        if watched.fails_at == len(output):
            return Expected(output, "error", None)
        token = choose(state, params.seed or 0, index, stops if len(output) < params.min_tokens else [])
        output.append(token)
        if token in params.stop_token_ids:
            return Expected(output, "stop", token)
        if token == EOS and not params.ignore_eos:
            return Expected(output, "stop", None)
        if len(output) == request.max_tokens:
            return Expected(output, "length", None)
        state = advance(state, token)


def searched(watched: Watched) -> dict[int, Expected]:
    """The answers of a beam search that is done by the book: whole sequences, nothing shared, nothing kept between two
    steps but tokens and scores."""
    request, params = watched.request, watched.request.params
    width, max_tokens = params.num_sequences, request.max_tokens
    stops = [*([] if params.ignore_eos else [EOS]), *params.stop_token_ids]

    def state_of(output: list[int]) -> int:
        state = root(request.prompt.cache_salt)
        for token in [*request.prompt.token_ids, *output]:
            state = advance(state, token)
        return state

    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    finished: list[tuple[float, list[int]]] = []
    for length in range(1, max_tokens + 1):
        if watched.fails_at == length - 1:
            return dict.fromkeys(range(width), Expected([], "error", None))
        masked = [EOS, *params.stop_token_ids] if length - 1 < params.min_tokens else []
        found = [
            (score + value, [*output, token])
            for score, output in beams
            for token, value in likelihoods(state_of(output), masked)
        ]
        found.sort(key=lambda one: (-one[0], one[1]))
        penalty = length**params.length_penalty
        ends = [one[1][-1] in stops or length == max_tokens for one in found]
        finished += [
            (score / penalty, output) for (score, output), end in zip(found[:width], ends, strict=False) if end
        ]
        finished = sorted(finished, key=lambda one: (-one[0], one[1]))[:width]
        beams = [one for one, end in zip(found, ends, strict=True) if not end][:width]
        if not beams:
            break
        if len(finished) == width:
            longest_is_best = params.early_stopping == "never" and params.length_penalty > 0
            most = max_tokens**params.length_penalty if longest_is_best else penalty
            if params.early_stopping is True or beams[0][0] / most <= finished[-1][0]:
                break

    def expected(output: list[int]) -> Expected:
        if output[-1] in params.stop_token_ids:
            return Expected(output, "stop", output[-1])
        return Expected(output, "stop" if output[-1] in stops else "length", None)

    return {index: expected(output) for index, (_, output) in enumerate(finished[: params.n])}


def likelihoods(state: int, masked: list[int]) -> list[tuple[int, float]]:
    """Every token that may follow and a number that stands for its log-probability, best first; no two are equal."""
    values = [(token, -(hash((state, token)) % 2**40) / 2**37) for token in range(VOCAB_SIZE) if token not in masked]
    return sorted(values, key=lambda one: -one[1])


class Device:
    """Carries out plans as `ModelRunner` does, with numbers in the place of keys and values."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        setup = simulation.setup
        self.block_size = setup.block_size
        self.memory = [0] * (setup.num_blocks * setup.block_size)
        self.host_memory = [0] * (setup.num_host_blocks * setup.block_size)
        self.table = SequenceTable(
            setup.max_num_seqs, setup.max_num_batched_tokens, setup.num_blocks * setup.block_size, setup.block_size
        )
        self.admissions: dict[int, Admission] = {}
        self._states: dict[tuple[str, int], list[int]] = {}  # what each token's slot must hold, by sequence

    def execute(self, plan: StepPlan) -> StepResult:
        self._move(plan.moves.swap_out, self.memory, self.host_memory)
        self._move(plan.moves.copy, self.memory, self.memory)
        self._move(plan.moves.swap_in, self.host_memory, self.memory)
        self.table.update(plan)
        for admission in plan.admissions:
            self.admissions[admission.row] = admission
        sequences = {seq.row: seq for seq in self.simulation.scheduler.running}
        last_states = self._compute(plan, sequences)
        for seq in self.simulation.scheduler.live_sequences():
            self._check_memory(seq, min(seq.num_computed_tokens, len(seq.token_ids)))
        return self._sample(plan, sequences, last_states)

    def _move(self, pairs: list[tuple[int, int]], source: list[int], destination: list[int]) -> None:
        """All sources are read before anything is written, as with torch's indexing."""
        size = self.block_size
        contents = [source[a * size : (a + 1) * size] for a, _ in pairs]
        for (_, b), content in zip(pairs, contents, strict=True):
            destination[b * size : (b + 1) * size] = content

    def _compute(self, plan: StepPlan, sequences: dict[int | None, Sequence]) -> list[int]:
        """Fill the slots of the batch's tokens, and return the last state of each row."""
        batch = self.table.build(plan)
        tokens, slots = batch.token_ids.tolist(), batch.slot_mapping.tolist()
        starts, positions, tables = (
            batch.query_start_loc.tolist(),
            batch.positions.tolist(),
            batch.block_tables.tolist(),
        )
        size = self.block_size
        last_states = []
        for s, row in enumerate(plan.rows):
            first, end = starts[s], starts[s + 1]
            before = positions[first] - 1
            state = root(sequences[row].request.prompt.cache_salt)
            if before >= 0:
                state = self.memory[tables[s][before // size] * size + before % size]
            for t in range(first, end):
                state = self.memory[slots[t]] = advance(state, tokens[t])
            last_states.append(state)
        return last_states

    def _check_memory(self, seq: Sequence, num_computed: int) -> None:
        """The blocks of a sequence hold exactly its own tokens, on the device or on the host."""
        if seq.beam is not None:  # the next one of its index is another
            self._states.pop((seq.request.request_id, seq.index), None)
        states = self._states.setdefault((seq.request.request_id, seq.index), [])
        state = states[-1] if states else root(seq.request.prompt.cache_salt)
        for token in seq.token_ids[len(states) :]:
            state = advance(state, token)
            states.append(state)
        memory, blocks = (self.host_memory, seq.host_blocks) if seq.host_blocks else (self.memory, seq.block_table)
        size = self.block_size
        for i, block in enumerate(blocks[: -(-num_computed // size)]):
            count = min(size, num_computed - i * size)
            found, wanted = memory[block * size : block * size + count], states[i * size : i * size + count]
            assert found == wanted, f"{seq.request.request_id} reads what is not its own"

    def _sample(self, plan: StepPlan, sequences: dict[int | None, Sequence], last_states: list[int]) -> StepResult:
        result = StepResult(tokens=[])
        for row, state, computed, count, samples in zip(
            plan.rows, last_states, plan.num_computed, plan.num_tokens, plan.num_samples, strict=True
        ):
            admission = self.admissions[row]
            num_output = computed + count - admission.num_prompt_tokens
            masked = admission.stop_token_ids if num_output < admission.params.min_tokens else []
            drawn = [choose(state, admission.seed, admission.index + fork, masked) for fork in range(samples)]
            result.logprobs = result.logprobs or []
            result.logprobs += [None] * len(drawn)
            if drawn and admission.params.use_beam_search:
                num_offered = admission.params.num_sequences + len(admission.stop_token_ids)
                best = likelihoods(state, masked)[:num_offered]
                result.logprobs[-1] = TokenLogprobs([0, *(t for t, _ in best)], [0.0, *(v for _, v in best)], 1)
            if drawn:
                self.table.tokens[row, computed + count] = drawn[0]
                watched = self.simulation.requests[sequences[row].request.request_id]
                if watched.fails_at is not None and watched.fails_at == num_output:
                    result.errors[row] = FAILURE
            result.tokens += drawn
            if admission.params.prompt_logprobs is not None and len(admission.token_ids) == admission.num_prompt_tokens:
                end = min(computed + count, admission.num_prompt_tokens - 1)
                predicted = self.table.tokens[row, computed + 1 : max(end, computed) + 1].tolist()
                result.prompt_logprobs[row] = [TokenLogprobs([token], [-1.0], 1) for token in predicted]
        return result


class Workload:
    """Random operations on a simulation. `integer(low, high)`, both included, is where the randomness comes from."""

    def __init__(self, simulation: Simulation, integer: Callable[[int, int], int]) -> None:
        self.simulation = simulation
        self.integer = integer
        setup = simulation.setup
        self.longest = setup.max_model_len
        # Prompts begin alike, so that there are prefixes to share.
        documents = random.Random(17)
        self.documents = [[documents.randrange(1, VOCAB_SIZE) for _ in range(self.longest)] for _ in range(3)]

    def chance(self, percent: int) -> bool:
        return self.integer(1, 100) <= percent

    def add(self) -> None:
        setup = self.simulation.setup
        integer, chance = self.integer, self.chance
        num_prompt = integer(1, max(1, self.longest // (2 if chance(20) else 4)))
        prompt = self.documents[integer(0, 2)][:num_prompt]
        if chance(50):
            kept = integer(0, num_prompt - 1)
            prompt = prompt[:kept] + [integer(1, VOCAB_SIZE - 1) for _ in range(min(num_prompt - kept, 3))]
        max_tokens = integer(1, max(1, min(self.longest - len(prompt), 24)))
        n = integer(1, min(4, setup.max_num_seqs)) if chance(25) else 1
        best_of = integer(n, min(5, setup.max_num_seqs)) if chance(15) else None
        num_blocks = -(-(len(prompt) + max_tokens) // setup.block_size)
        is_search = chance(15)
        if is_search:  # as wide as the blocks allow, so that beams are short of them
            best_of = max(1, min(setup.max_num_seqs, 6, setup.num_blocks // num_blocks))
            n = integer(1, best_of)
        self.simulation.add(
            prompt,
            SamplingParams(
                use_beam_search=is_search,
                length_penalty=integer(-1, 3) / 2 if is_search else 1.0,
                early_stopping=(False, True, "never")[integer(0, 2)] if is_search else False,
                n=n,
                best_of=best_of,
                max_tokens=max_tokens,
                min_tokens=integer(0, max_tokens) if chance(20) else 0,
                stop_token_ids=[integer(1, VOCAB_SIZE - 1) for _ in range(integer(0, 3))],
                ignore_eos=chance(30),
                seed=integer(0, 3),
                prompt_logprobs=0 if chance(10) else None,
            ),
            priority=integer(-2, 2),
            cache_salt="salt" if chance(15) else None,
            fails_at=integer(0, 4) if chance(4) else None,
        )

    def abort(self) -> None:
        simulation = self.simulation
        if not simulation.requests:
            return
        request_id = list(simulation.requests)[self.integer(0, len(simulation.requests) - 1)]
        if self.chance(50):
            simulation.abort(request_id)
        else:
            live = sorted(simulation.requests[request_id].live)
            simulation.abort_one(request_id, live[self.integer(0, len(live) - 1)])

    def run(self, num_operations: int) -> None:
        """Bursts of arrivals, quiet times, and now and then everybody hangs up."""
        simulation = self.simulation
        end = simulation.num_operations + num_operations
        busy = 30
        while simulation.num_operations < end:
            if self.chance(2):
                busy = self.integer(0, 60)
            if not simulation.requests or (self.chance(busy) and len(simulation.requests) < 40):
                self.add()
            elif self.chance(8):
                self.abort()
            elif self.integer(1, 1000) == 1:
                for request_id in list(simulation.requests):
                    simulation.abort(request_id)
            else:
                simulation.step()


def root(salt: str | None) -> int:
    """The state before the first token. The salt stands in it so that blocks shared across salts would show."""
    return 1 + sum((salt or "").encode())


def advance(state: int, token: int) -> int:
    return hash((state, token))


def choose(state: int, seed: int, index: int, masked: list[int]) -> int:
    """A token that is a function of everything before it, of the request's seed and of which completion it is."""
    for attempt in range(1000):
        token = hash((state, seed, index, attempt)) % VOCAB_SIZE
        if token not in masked:
            return token
    raise AssertionError("everything is masked")
