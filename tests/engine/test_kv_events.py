"""`--kv-events-config` in the whole engine: what a subscriber of vLLM's events reads."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from octavo import LLM, SamplingParams
from octavo.config import KVEventsConfig
from octavo.engine.kv_event_publisher import KVEventPublisher, endpoint_of_rank
from octavo.errors import ConfigError
from octavo.kv_cache.block_events import AllBlocksCleared, Event
from tests.models.small_models import MODELS
from tests.waiting import within

SIZE = 8
PROMPT = list(range(3, 3 + 3 * SIZE))


@pytest.fixture
def small(tmp_path: Path, tiny_tokenizer: Path) -> Iterator[Any]:
    """Make engines of a small model whose events are published below `tmp_path`."""
    folder, made = tmp_path / "model", list[LLM]()
    MODELS["qwen3"].save(MODELS["qwen3"].reference(seed=2), folder)

    def make(num_blocks: int = 12, parallel: dict[str, int] | None = None, **settings: Any) -> LLM:
        events = {
            "enable_kv_cache_events": True, "endpoint": f"ipc://{tmp_path}/events",
            "replay_endpoint": f"ipc://{tmp_path}/replay", "topic": "kv",
        }  # fmt: skip
        made.append(
            LLM(
                str(folder), tokenizer=str(tiny_tokenizer), dtype="float32", max_model_len=64, block_size=SIZE,
                num_gpu_blocks_override=num_blocks, kv_events_config=events | settings,
                **(parallel or {}),
            )
        )  # fmt: skip
        return made[-1]

    yield make
    for llm in made:
        llm.close()


def generate(llm: LLM, prompt: list[int]) -> None:
    llm.generate([{"prompt_token_ids": prompt}], SamplingParams(max_tokens=2, temperature=0), use_tqdm=False)


def replayed(endpoint: str, first: int = 0, read_ahead: int = 1000) -> list[tuple[int, list[Any]]]:
    """Return the messages from number `first` on, as the replay endpoint gives them."""
    found = []
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger, socket.rcvtimeo, socket.rcvhwm = 0, int(within(30) * 1000), read_ahead
        socket.connect(endpoint)
        socket.send_multipart([b"", first.to_bytes(8, "big")])
        while True:
            empty, number, payload = socket.recv_multipart()
            assert not empty
            if not payload:
                assert number == b"\xff" * 8, "the number that ends a replay of vLLM"
                return found
            found.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)))


def test_a_router_reads_what_vllm_would_send(small: Any, tmp_path: Path) -> None:
    llm = small()
    generate(llm, PROMPT)
    messages = replayed(f"ipc://{tmp_path}/replay")
    assert [number for number, _ in messages] == list(range(len(messages)))
    assert {rank for _, (_, _, rank) in messages} == {0}
    events = [event for _, (_, events, _) in messages for event in events]
    assert events[0] == {"type": "AllBlocksCleared"}
    stored = events[1]
    hashes = stored.pop("block_hashes")
    assert stored == {
        "type": "BlockStored", "parent_block_hash": None, "token_ids": PROMPT, "block_size": SIZE,
        "lora_id": None, "medium": "GPU", "lora_name": None, "group_idx": 0, "kv_cache_spec_kind": "full_attention",
    }  # fmt: skip
    generate(llm, [*PROMPT, *range(40, 48)])
    [(_, (_, [more], _))] = replayed(f"ipc://{tmp_path}/replay", len(messages))
    assert (more["parent_block_hash"], more["token_ids"]) == (hashes[-1], list(range(40, 48)))
    for first in (50, 70, 90):
        generate(llm, list(range(first, first + 4 * SIZE)))
    llm.reset_prefix_cache()
    events = [event for _, (_, events, _) in replayed(f"ipc://{tmp_path}/replay") for event in events]
    removed = {block for event in events if event["type"] == "BlockRemoved" for block in event["block_hashes"]}
    assert removed & {*hashes, *more["block_hashes"]}
    assert events[-1] == {"type": "AllBlocksCleared"}


def test_engines_of_several_workers_in_other_processes_tell_of_their_own_blocks(small: Any, tmp_path: Path) -> None:
    llm = small(parallel={"data_parallel_size": 2, "tensor_parallel_size": 2})
    prompts = [[number, *PROMPT[1:]] for number in range(30, 34)]
    params = SamplingParams(max_tokens=2, temperature=0)
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    stored = []
    for rank, suffix in enumerate(("", "_dp1")):
        messages = replayed(f"ipc://{tmp_path}/replay{suffix}")
        assert {found for _, (_, _, found) in messages} == {rank}
        found = [event["token_ids"] for _, (_, events, _) in messages for event in events if "token_ids" in event]
        assert found
        stored += found
    assert sorted(stored) == prompts


def test_subscribers_get_each_message_with_topic_and_number(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/events"
    events: Iterator[list[Event]] = cycle([[], [AllBlocksCleared()]])
    publisher = KVEventPublisher(KVEventsConfig(True, endpoint=endpoint, topic="kv"), 2, events.__next__)
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.linger = 0
        socket.connect(f"{endpoint}_dp2")
        socket.subscribe("kv")
        numbers = []
        while len(numbers) < 3:  # a subscription takes effect some time after it is made
            publisher.publish()
            publisher.publish()
            if socket.poll(10):
                topic, number, payload = socket.recv_multipart()
                numbers.append(int.from_bytes(number, "big"))
        assert (topic, numbers) == (b"kv", list(range(numbers[0], numbers[0] + 3)))
        assert msgspec.msgpack.decode(payload)[2] == 2
    publisher.close()


def test_the_oldest_messages_are_forgotten(tmp_path: Path) -> None:
    config = KVEventsConfig(
        True, endpoint=f"ipc://{tmp_path}/events", replay_endpoint=f"ipc://{tmp_path}/replay", buffer_steps=2
    )
    publisher = KVEventPublisher(config, 0, lambda: [AllBlocksCleared()])
    for _ in range(5):
        publisher.publish()
    assert [number for number, _ in replayed(config.replay_endpoint or "")] == [3, 4]
    publisher.close()
    KVEventPublisher(config, 0, lambda: [AllBlocksCleared()]).close()  # the endpoints are free again


def test_a_client_that_reads_late_misses_nothing(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/replay"
    config = KVEventsConfig(True, endpoint=f"ipc://{tmp_path}/events", replay_endpoint=endpoint)
    publisher = KVEventPublisher(config, 0, lambda: [AllBlocksCleared()])
    for _ in range(10_000):  # far more than what a socket holds by default
        publisher.publish()
    assert len(replayed(endpoint, read_ahead=1)) == 10_000
    publisher.close()


def test_each_engine_has_endpoints_of_its_own() -> None:
    assert endpoint_of_rank("tcp://*:5557", 0) == "tcp://*:5557"
    assert endpoint_of_rank("tcp://*:5557", 3) == "tcp://*:5560"
    assert endpoint_of_rank("tcp://[::]:5557", 1) == "tcp://[::]:5558"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"port": 1}, "has no 'port'; it takes enable_kv_cache_events, publisher"),
        ({"hwm": 0}, "hwm must be at least 1, got 0"),
        ({"hwm": "a"}, "Expected `int`, got `str`"),
        ({"publisher": "nats"}, "Invalid enum value 'nats'"),
        ({"endpoint": "5557"}, "'5557' is no endpoint; write tcp"),
        ({"endpoint": "ipc:///nowhere/at/all"}, "the endpoint ipc:///nowhere/at/all cannot be used"),
    ],
)
def test_a_wrong_configuration_is_refused(small: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        small(**settings)


def test_events_need_the_prefix_cache_and_are_off_by_default(small: Any, tmp_path: Path) -> None:
    small(enable_kv_cache_events=False)
    small(publisher="null")
    assert not (tmp_path / "events").exists()
