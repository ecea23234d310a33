"""Adapters in the engine core, without a model: random requests, loads, unloads, failures and aborts, of which none is
ever computed with another's adapter, and nothing leaks."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.config import SchedulerConfig
from octavo.engine.core import EngineCore
from octavo.errors import RequestError
from octavo.kv_cache.groups import LayerCacheSpec, group_layers
from octavo.lora.pool import AdapterPool
from octavo.request import AdapterSource, EngineRequest, Prompt
from octavo.sampling_params import SamplingParams
from octavo.scheduling.adapter_turns import MAX_BYPASSES, AdapterTurn
from octavo.step_plan import AdapterMemory, StepPlan, StepResult

NUM_PAGES, NUM_HOST_PAGES, PAGE_BYTES = 12, 9, 100
BASE_TOKEN = 5


@pytest.fixture(scope="module", autouse=True)
def no_waiting() -> Iterator[None]:
    """Nothing here is read by a thread."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("octavo.engine.core._PREPARE_WAIT_S", 0)
        yield


def pages_of(identity: str) -> int:
    return 1 + int(identity) % 4


def token_of(identity: str | None) -> int:
    return BASE_TOKEN if identity is None else 10 + int(identity)


class AdapterDevice:
    """An executor that samples a token which says what the row's adapter is on the device, by its pages."""

    cache_groups = group_layers([LayerCacheSpec("full", num_kv_heads=1, key_size=8, value_size=8)])

    def __init__(self, runs_ahead: bool, shares_memory: bool) -> None:
        self.runs_ahead, self.num_stages = runs_ahead, 1
        self.num_blocks, self.num_host_blocks = [30], [0]
        self.weight_bytes = self.cache_bytes = 1 << 20
        num_pages, num_slots = (0, 2) if shares_memory else (NUM_PAGES, NUM_PAGES)
        self.adapter_memory = AdapterMemory(num_pages, num_slots, NUM_HOST_PAGES, PAGE_BYTES)
        self.reading: dict[str, list[Future[int]]] = {}
        self.on_host: set[str] = set()
        self.pages: list[str | None] = [None] * NUM_PAGES
        self.slots: dict[int, tuple[str, list[int]]] = {}
        self.rows: dict[int, int] = {}

    def prepare_adapter(self, source: AdapterSource) -> Future[int]:
        ready: Future[int] = Future()
        self.reading.setdefault(source.identity, []).append(ready)
        return ready

    def read(self, identity: str, error: Exception | None = None) -> None:
        """The thread is done with one."""
        for ready in self.reading.pop(identity):
            if error is not None:
                ready.set_exception(error)
            else:
                self.on_host.add(identity)
                ready.set_result(pages_of(identity))

    def forget_adapter(self, identity: str) -> None:
        self.on_host.discard(identity)

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        for identity, slot, pages in plan.adapters:
            assert identity in self.on_host, "loaded from nowhere"
            for page in pages:
                self.pages[page] = identity
            self.slots[slot] = identity, pages
        for admission in plan.admissions:
            self.rows[admission.row] = admission.adapter_slot
        tokens: list[int] = []
        mixed = set()
        for planned in plan.rows:
            slot = self.rows[planned.row]
            identity = None
            if slot >= 0:
                identity, pages = self.slots[slot]
                assert all(self.pages[page] == identity for page in pages), "its pages were given to another"
                mixed.add(identity)
            tokens += [token_of(identity)] * planned.num_samples
        assert len(mixed) <= 2, "a step mixes more adapters than --max-loras"
        done: Future[StepResult] = Future()
        done.set_result(StepResult(tokens))
        return done


def make_core(
    runs_ahead: bool = False, max_loras: int = 2, max_cpu_loras: int | None = 4, shares_memory: bool = False
) -> tuple[EngineCore, AdapterDevice]:
    scheduler = SchedulerConfig(
        max_num_seqs=6, max_num_batched_tokens=32, enable_chunked_prefill=True, policy="fcfs",
        preemption_mode="recompute", check_invariants=True,
    )  # fmt: skip
    cache = SimpleNamespace(block_size=4, enable_prefix_caching=True, disk=None, host_bytes=0, events=None)
    lora = SimpleNamespace(max_loras=max_loras, max_cpu_loras=max_cpu_loras)
    config = SimpleNamespace(
        scheduler=scheduler, cache=cache, model=SimpleNamespace(seed=0), device="cpu", lora=lora, speculative=None,
        draft=None, media=None, sound=None, prompt_embeds=None,
    )  # fmt: skip
    device = AdapterDevice(runs_ahead, shares_memory)
    core = EngineCore(cast(Any, config), cast(Any, device))
    core.cost.observe = lambda *measured: None  # type: ignore[method-assign]  # or how prompts are cut depends on time
    return core, device


def adapter(number: int) -> AdapterSource:
    """Its file has twice the bytes that it takes."""
    return AdapterSource(str(number), f"a{number}", None, "file", 2 * PAGE_BYTES * pages_of(str(number)))


def request(name: str, number: int | None, max_tokens: int = 3, n: int = 1, length: int = 9) -> EngineRequest:
    source = None if number is None else adapter(number)
    prompt = Prompt([1] * length, adapter=None if source is None else source.identity)
    params = SamplingParams(max_tokens=max_tokens, n=n)
    return EngineRequest(name, prompt, params, [0], max_tokens, 0.0, adapter=source)


class Workload:
    """Random operations, and what each request must be told."""

    def __init__(self, seed: int, runs_ahead: bool, max_cpu_loras: int | None, shares_memory: bool) -> None:
        self.random = random.Random(seed)
        self.core, self.device = make_core(runs_ahead, 2, max_cpu_loras, shares_memory)
        self.live: dict[str, EngineRequest] = {}
        self.ended: Counter[str] = Counter()

    def operate(self) -> None:
        kind = self.random.choices(["add", "abort", "read", "fail", "load", "unload", "step"], [4, 1, 4, 1, 1, 1, 6])[0]
        if kind == "add":
            name, number = (
                f"r{len(self.ended) + len(self.live)}.{self.random.random()}",
                self.random.choice([None, *range(9)]),
            )
            size = self.random.choice([1, 3, 8]), self.random.choice([1, 1, 2]), self.random.choice([5, 20, 40])
            self.live[name] = request(name, number, *size)
            self.core.add(self.live[name])
        elif kind == "abort" and self.live:
            name = self.random.choice(list(self.live))
            self.core.abort(name)
            del self.live[name]
            self.ended["aborted"] += 1
        elif kind in ("read", "fail") and self.device.reading:
            identity = self.random.choice(list(self.device.reading))
            self.device.read(identity, RequestError("broken") if kind == "fail" else None)
        elif kind == "load":
            self.core.load_adapter(adapter(self.random.randrange(9)), pins=self.random.random() < 0.1)
        elif kind == "unload":
            self.core.unload_adapter(str(self.random.randrange(9)))
        elif kind == "step":
            self.step()

    def step(self) -> None:
        if not self.core.has_work:
            return
        for output in self.core.step().outputs:
            if output.request_id not in self.live:
                continue  # it was aborted
            asked = self.live[output.request_id]
            if output.finish_reason == "error":
                assert output.error is not None and asked.adapter is not None
                assert output.error == "broken" or "are pinned" in output.error
                del self.live[output.request_id]
                self.ended["failed"] += 1
                continue
            assert set(output.token_ids) <= {token_of(asked.prompt.adapter)}, "computed with another adapter"
            if output.finish_reason is not None and self.core.scheduler.queues.requests.get(output.request_id) is None:
                del self.live[output.request_id]
                self.ended["finished"] += 1
        self.check_host()

    def check_host(self) -> None:
        library = self.core.adapters
        assert library is not None
        if library.max_on_host is not None:
            assert max(len(library), len(self.device.on_host)) <= library.max_on_host, "more on the host than may be"
        else:
            assert sum(map(pages_of, self.device.on_host)) <= NUM_HOST_PAGES, "more on the host than it has memory for"

    def drain(self) -> None:
        for _ in range(3000):
            for identity in list(self.device.reading):
                self.device.read(identity)
            if not self.core.has_work:
                break
            self.step()
        assert not self.core.has_work and not self.live, "somebody starved"
        pool = self.core.adapters.pool  # type: ignore[union-attr]
        pool.check([])
        assert not pool.running
        self.check_host()
        self.core.scheduler.check()


@settings(derandomize=True, deadline=None, max_examples=12)
@given(
    seed=st.integers(0, 10**6), runs_ahead=st.booleans(), max_cpu_loras=st.sampled_from([4, None]),
    shares_memory=st.booleans(),
)  # fmt: skip
def test_random_workloads_serve_nothing_wrong_and_leak_nothing(
    seed: int, runs_ahead: bool, max_cpu_loras: int | None, shares_memory: bool
) -> None:
    workload = Workload(seed, runs_ahead, max_cpu_loras, shares_memory)
    for _ in range(250):
        workload.operate()
    workload.drain()


@pytest.mark.long
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_ten_thousand_operations(runs_ahead: bool) -> None:
    workload = Workload(1, runs_ahead, None if runs_ahead else 4, not runs_ahead)
    for _ in range(10_000):
        workload.operate()
    workload.drain()
    assert min(workload.ended[kind] for kind in ("finished", "failed", "aborted")) > 50


def run(core: EngineCore, most: int = 50) -> list[str]:
    """Steps until nothing is left to do. Returns requests in the order in which they end."""
    ended = []
    for _ in range(most):
        if not core.has_work:
            break
        ended += [output.request_id for output in core.step().outputs if output.finish_reason is not None]
    return ended


def test_who_waits_for_an_adapter_does_not_block_others() -> None:
    core, device = make_core()
    core.add(request("slow", 1))
    core.add(request("base", None))
    core.add(request("fast", 2))
    device.read("2")
    assert set(run(core, 10)) == {"base", "fast"}
    device.read("1")
    assert run(core) == ["slow"]


def test_an_adapter_without_room_is_passed_by_residents_but_not_for_ever() -> None:
    """One adapter at a time, and always somebody who wants the resident one."""
    core, device = make_core(max_loras=1)
    core.add(request("first", 1, 4))
    device.read("1")
    core.step()
    core.add(request("other", 2, 1))
    device.read("2")
    order: list[str] = []
    for i in range(4 * MAX_BYPASSES):
        core.add(request(f"more {i}", 1, 4))
        order += [output.request_id for output in core.step().outputs if output.finish_reason is not None]
        if "other" in order:
            break
    assert "other" in order, "starved"
    assert "more 0" in order[: order.index("other")], "those whose adapter was there went first"


@pytest.mark.parametrize("has_base", [False, True])
def test_who_waits_for_one_adapter_is_asked_about_once(monkeypatch: pytest.MonkeyPatch, has_base: bool) -> None:
    """However many wait for it, and whether somebody was bypassed too often or not."""
    core, device = make_core(max_loras=1)
    core.add(request("first", 1, 50))
    device.read("1")
    core.step()
    for i in range(100):
        core.add(request(f"other {i}", 2, 1))
    device.read("2")
    core.step()
    asked: list[str] = []
    can_start = AdapterPool.can_start
    monkeypatch.setattr(AdapterPool, "can_start", lambda pool, name: asked.append(name) or can_start(pool, name))
    consider, walked = AdapterTurn.consider, list[Any]()
    monkeypatch.setattr(AdapterTurn, "consider", lambda turn, seq: walked.append(seq) or consider(turn, seq))
    core.step()
    assert asked == ["2"] and len(walked) == 1
    for seq in core.scheduler.queues.waiting[:1]:
        seq.num_bypassed = MAX_BYPASSES
    core.add(request("too late", 1, 1))
    if has_base:
        core.add(request("base", None, 1))
    outputs = core.step().outputs
    assert [output.request_id for output in outputs if output.finish_reason] == ["base"] * has_base
    assert asked == ["2", "2"] and len(walked) == (1 + 102 if has_base else 2)


def test_the_least_recently_used_adapter_makes_room() -> None:
    core, device = make_core(max_loras=2, max_cpu_loras=9)
    for number in (3, 7, 1, 3, 2):  # 4, 4, 2, and 3 pages of 12
        core.add(request(f"r{number}", number, 1))
        if str(number) in device.reading:
            device.read(str(number))
        run(core)
    assert core.adapters is not None
    assert set(core.adapters.pool.resident) == {"3", "1", "2"}, "7 was used before 3 was used again"
    outputs = core.step()
    assert (outputs.stats.num_adapters_on_host, outputs.stats.num_adapter_reads) == (4, 0), "each read was told once"


def test_the_host_has_as_many_adapters_as_its_memory_holds() -> None:
    core, device = make_core(max_cpu_loras=None)
    for number in (0, 1, 2):  # 1, 2 and 3 pages, of files of 2, 4 and 6; the host has 9
        core.add(request(f"r{number}", number, 1))
    core.step()
    assert [*device.reading] == ["0", "1"], "what is being read counts as its file"
    device.read("0")
    device.read("1")
    assert run(core, 3) == ["r0", "r1"]
    device.read("2")
    assert run(core) == ["r2"]
    assert device.on_host == {"0", "1", "2"}
    core.add(request("r3", 3, 1))  # 4 pages, of a file of 8
    run(core, 1)
    device.read("3")
    assert run(core) == ["r3"]
    assert device.on_host == {"3"}, "0 alone would have been too large for its file"


def test_an_adapter_makes_room_for_those_that_were_larger_than_their_files() -> None:
    core, device = make_core(max_cpu_loras=None)
    sources = [AdapterSource(str(number), f"a{number}", None, "file", 1) for number in (3, 7, 11)]  # 4 pages each
    for source in (*sources, sources[-1]):
        core.load_adapter(source)
        core.step()
        if source.identity in device.reading:
            device.read(source.identity)
            core.step()
    assert device.on_host == {"7", "11"}, "the host has 9 pages"


def test_one_adapter_is_copied_in_a_step_and_any_number_is_used_where_it_lies() -> None:
    for shares_memory in (False, True):
        core, device = make_core(shares_memory=shares_memory)
        for number in (1, 2):
            core.add(request(f"r{number}", number, 1))
            device.read(str(number))
        stats = core.step().stats
        assert stats.num_adapter_loads == (2 if shares_memory else 1)
        assert sorted(run(core)) == (["r2"] if not shares_memory else [])


def test_loading_tells_when_it_is_done_and_why_it_failed() -> None:
    core, device = make_core()
    core.load_adapter(adapter(1))
    core.load_adapter(adapter(2))
    assert core.step().adapters == []
    device.read("1")
    device.read("2", RequestError("no such tensor"))
    told = {loaded.identity: loaded.error for loaded in core.step().adapters}
    assert told == {"1": None, "2": "no such tensor"}
    assert not core.has_work


def test_what_was_unloaded_while_it_was_read_is_not_pinned() -> None:
    core, device = make_core(max_loras=1, max_cpu_loras=1)
    core.load_adapter(adapter(1), pins=True)
    core.step()
    core.unload_adapter("1")
    device.read("1")
    assert [loaded.error for loaded in core.step().adapters] == [None]
    core.add(request("other", 2))
    core.step()
    device.read("2")
    assert run(core) == ["other"]


def test_what_somebody_waits_for_is_pinned_though_others_want_its_room() -> None:
    core, device = make_core(max_loras=1, max_cpu_loras=1)
    core.load_adapter(adapter(1), pins=True)
    core.step()
    device.read("1")
    core.add(request("other", 2))
    assert [loaded.error for loaded in core.step().adapters] == [None]
    assert core.adapters is not None and core.adapters.has("1")


def test_adapters_without_room_are_refused_where_all_others_are_pinned() -> None:
    core, device = make_core(max_cpu_loras=2)
    for number in (1, 2):
        core.load_adapter(adapter(number), pins=True)
    core.step()
    for number in (1, 2):
        device.read(str(number))
    core.step()
    core.add(request("third", 3))
    core.load_adapter(adapter(4))
    told = core.step()
    refused = "all 2 places (--max-cpu-loras) have adapters that are pinned"
    assert [(output.request_id, refused in (output.error or "")) for output in told.outputs] == [("third", True)]
    assert [(loaded.identity, refused in (loaded.error or "")) for loaded in told.adapters] == [("4", True)]
    assert not core.has_work
    core.unload_adapter("1")
    core.add(request("fourth", 3))
    device.read("3")
    assert run(core) == ["fourth"]


def test_an_idle_core_waits_for_what_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar that is compiled does not keep it from sleeping until the adapter is read too."""
    core, device = make_core()
    compiled: Future[None] = Future()
    compiled.set_result(None)
    device.prepare_grammar = lambda grammar, holder: compiled  # type: ignore[attr-defined]
    asked = request("r", 1)
    asked.params.grammar = "start: A"
    core.add(asked)
    waited: list[list[Future[Any]]] = []
    monkeypatch.setattr("octavo.engine.core.wait", lambda futures, **options: waited.append(list(futures)))
    core.step()
    assert waited == [device.reading["1"]]
    device.read("1")
    assert run(core) == ["r"]
    assert len(waited) == 1, "all is ready"


def test_what_is_added_looks_at_no_other_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither at those that live, unless room is short, nor at those that wait for an adapter."""
    core, device = make_core()
    core.add(request("first", 1))
    device.read("1")
    core.step()
    prepare, prepared = core._prepare, list[int]()

    def look() -> set[str]:
        pytest.fail("it looks at all that live")

    def note(several: list[Any]) -> None:
        prepared.append(len(several))
        prepare(several)

    monkeypatch.setattr(core, "_adapters_in_use", look)
    monkeypatch.setattr(core, "_prepare", note)
    for i in range(50):
        core.add(request(f"resident {i}", 1))
        core.add(request(f"read {i}", 2))
    assert prepared == [1] * 100
    device.read("2")
    assert len(run(core, 200)) == 101
