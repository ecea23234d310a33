"""Adapters of the default model in one engine: bits that do not depend on company, identity by content, and what is
refused."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from octavo import LLM, AsyncLLMEngine, EngineArgs, LLMEngine, SamplingParams
from octavo.engine.engine_client import make_engine
from octavo.errors import ConfigError, OctavoError, RequestError
from octavo.lora.request import LoRARequest
from octavo.sequence import Sequence
from octavo.stats import EngineStats
from tests.lora.random_adapters import SIZES, write_random_adapter
from tests.waiting import until, within

NUM_ADAPTERS = 16
PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest]:
    folder = tmp_path_factory.mktemp("adapters")
    paths = [write_random_adapter(folder / f"a{i}", i, rank=1 + i) for i in range(NUM_ADAPTERS)]
    return [LoRARequest(path.name, i + 1, str(path)) for i, path in enumerate(paths)]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """Room for eight of the largest adapters, and on the host for as many as there are."""
    llm = LLM(
        max_model_len=256, num_gpu_blocks_override=1024, check_invariants=True, enable_lora=True, max_loras=8,
        max_cpu_loras=32, seed=0,
    )  # fmt: skip
    yield llm
    assert not llm.core.adapters.pool.running, "adapters are pinned when idle"


def params(max_tokens: int = 6, **more: object) -> SamplingParams:
    return SamplingParams(temperature=0.8, seed=7, max_tokens=max_tokens, ignore_eos=True, logprobs=2, **more)


def answers(llm: LLM, prompts: list[str], asked: list[LoRARequest | None], max_tokens: int = 6) -> list[object]:
    outputs = llm.generate(prompts, params(max_tokens), use_tqdm=False, lora_request=asked)
    assert [output.lora_request for output in outputs] == asked
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


def test_outputs_of_an_engine_tell_their_adapters(llm: LLM, adapters: list[LoRARequest]) -> None:
    engine = llm.llm_engine
    assert isinstance(engine, LLMEngine) and engine.lora_config is not None and engine.lora_config.max_loras == 8
    engine.add_request("with", PROMPT, params(), lora_request=adapters[0])
    engine.add_request("without", PROMPT, params())
    found = {}
    while engine.has_unfinished_requests():
        found |= {output.request_id: output.lora_request for output in engine.step()}  # type: ignore[union-attr]
    assert found == {"with": adapters[0], "without": None} and not engine._lora_requests
    llm.generate(PROMPT, params(1), use_tqdm=False, lora_request=adapters[1])
    assert engine.list_loras() >= {1, 2} and engine.remove_lora(2), "though nobody has added them"


def test_adapters_are_added_pinned_and_removed_by_their_numbers(
    llm: LLM, adapters: list[LoRARequest], tmp_path: Path
) -> None:
    """As with vLLM. What comes of requests meanwhile is not lost."""
    engine, library = llm.llm_engine, llm.core.adapters
    assert library is not None
    for number in engine.list_loras():  # that requests have named before
        assert engine.remove_lora(number)
    assert engine.list_loras() == set()
    engine.add_request("meanwhile", PROMPT, params())
    num_reads = len(library)
    assert [engine.add_lora(adapter) for adapter in adapters[14:]] == [True, True]
    assert engine.list_loras() == {15, 16} and len(library) == num_reads + 2
    assert engine.has_unfinished_requests()
    outputs = [output for _ in iter(engine.has_unfinished_requests, False) for output in engine.step()]
    assert [len(output.outputs[0].token_ids) for output in outputs] == list(range(1, 7)), "each token once, in order"  # type: ignore[union-attr]
    assert engine.pin_lora(16) and len(library._pinned) == 1
    with pytest.raises(RequestError, match="there is no adapter 3; add it first"):
        engine.pin_lora(3)
    assert [engine.remove_lora(number) for number in (15, 16, 16)] == [True, True, False]
    assert engine.list_loras() == set() and len(library) == num_reads and not library._pinned
    with pytest.raises(RequestError, match="'broken'"):
        engine.add_lora(LoRARequest("broken", 9, str(tmp_path)))
    write_random_adapter(tmp_path / "large", 1, rank=17)
    with pytest.raises(RequestError, match="rank 17"):
        engine.add_lora(LoRARequest("large", 9, str(tmp_path / "large")))
    assert engine.list_loras() == set()


@pytest.mark.long
def test_64_requests_over_16_adapters_and_the_base_are_as_each_alone(llm: LLM, adapters: list[LoRARequest]) -> None:
    generator = random.Random(0)
    asked = [generator.choice([None, *adapters]) for _ in range(64)]
    words = ["one", "two", "three", "four", "five", "six", "seven"]
    prompts = [" ".join(generator.choices(words, k=generator.randrange(3, 30))) for _ in asked]
    together = answers(llm, prompts, asked)
    for i in range(0, 64, 4):  # one after the other, each over again
        assert answers(llm, [prompts[i]], [asked[i]]) == together[i : i + 1]
    of_each = answers(llm, [PROMPT] * (1 + NUM_ADAPTERS), [None, *adapters], 1)
    assert len({str(answer) for answer in of_each}) == len(of_each), "adapters do something"
    plain = LLM(max_model_len=256, num_gpu_blocks_override=256, seed=0)
    base = [i for i, adapter in enumerate(asked) if adapter is None]
    outputs = plain.generate([prompts[i] for i in base], params(), use_tqdm=False)
    without = [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]
    assert without == [together[i] for i in base], "the base model's bits are those of a server without LoRA"


def write_eagle_head(folder: Path) -> Path:
    """A head of random numbers that reads the default model's embedding and output matrix."""
    generator = np.random.default_rng(0)
    sizes = {f"layers.0.{name}.weight": size for name, size in SIZES.items()} | {"fc.weight": (576, 1152)}
    tensors = {name: generator.normal(0, 0.05, size).astype(np.float32) for name, size in sizes.items()}
    folder.mkdir()
    save_file(
        tensors | {"layers.0.post_attention_layernorm.weight": np.ones(576, np.float32)}, folder / "model.safetensors"
    )
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536,
        "num_attention_heads": 9, "num_key_value_heads": 3, "num_hidden_layers": 1, "vocab_size": 49152,
        "max_position_embeddings": 256,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    "method", ["ngram", *(pytest.param(method, marks=pytest.mark.long) for method in ("draft_model", "eagle"))]
)
def test_guessed_tokens_take_their_sequence_s_adapter(
    llm: LLM, adapters: list[LoRARequest], tmp_path: Path, method: str
) -> None:
    """And whatever guesses takes none."""
    speculative: dict[str, object] = {"method": method, "num_speculative_tokens": 3}
    if method == "draft_model":
        speculative["model"] = llm.config.model.checkpoint.path
    elif method == "eagle":
        speculative["model"] = str(write_eagle_head(tmp_path / "head"))
    guessing = LLM(
        max_model_len=256, num_gpu_blocks_override=1024, check_invariants=True, enable_lora=True, max_loras=4, seed=0,
        speculative_config=speculative,
    )  # fmt: skip
    speculation = guessing.core.scheduler._speculation
    assert speculation is not None
    speculation.cost = None  # all that can be guessed is
    verified: dict[str | None, int] = {}
    counted = speculation.count

    def count(seq: Sequence, draft_tokens: tuple[int, ...], num_accepted: int, stats: EngineStats) -> None:
        verified[seq.adapter] = verified.get(seq.adapter, 0) + len(draft_tokens)
        counted(seq, draft_tokens, num_accepted, stats)

    speculation.count = count  # type: ignore[method-assign]
    asked = [None, adapters[1], adapters[2], None, adapters[3], adapters[1]]
    prompts = [f"{number} and one, two, three, one, two, three, one, two," for number in range(6)]
    assert answers(guessing, prompts, asked, 12) == answers(llm, prompts, asked, 12)
    assert len(verified) == 4 or (method == "ngram" and len(verified) > 1)


def test_another_adapter_under_the_same_name_is_another_adapter(llm: LLM, tmp_path: Path) -> None:
    """Neither its weights nor its cached blocks are those of the one before."""
    prompt = "word " * 40
    asked = LoRARequest("same", 1, str(write_random_adapter(tmp_path / "same", 100)))
    before = answers(llm, [prompt], [asked])
    write_random_adapter(tmp_path / "same", 101)
    after = answers(llm, [prompt], [asked])
    assert after != before
    other = LoRARequest("other name", 2, str(write_random_adapter(tmp_path / "other", 101)))
    (output,) = llm.generate([prompt], params(), use_tqdm=False, lora_request=other)
    assert [(output.outputs[0].token_ids, output.outputs[0].logprobs)] == after
    assert output.num_cached_tokens > 0, "equal contents share blocks, whatever their names"


def test_chat_and_prompt_logprobs_are_computed_with_the_adapter(llm: LLM, adapters: list[LoRARequest]) -> None:
    talk = [{"role": "user", "content": "Hello"}]
    said = [
        llm.chat(talk, params(), use_tqdm=False, lora_request=one)[0].outputs[0].logprobs for one in (None, adapters[0])
    ]
    assert said[0] != said[1]
    scored = [
        llm.generate(PROMPT, params(1, prompt_logprobs=0), use_tqdm=False, lora_request=one)[0].prompt_logprobs
        for one in (None, adapters[0])
    ]
    assert scored[0] != scored[1]


EMBEDDING = "../embed_tokens.weight"  # beside the layers
FACTORS = "../embed_tokens.lora_embedding"


def broken(folder: Path, **changes: object) -> Path:
    """An adapter of which the configuration or tensors are changed."""
    write_random_adapter(folder, 5)
    tensors = load_file(folder / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text())
    for name, value in changes.pop("tensors", {}).items():  # type: ignore[attr-defined]
        key = f"base_model.model.model.layers.3.{name}".replace("layers.3.../", "")
        tensors.pop(key, None) if value is None else tensors.update({key: np.ones(value, np.float32)})
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config | changes))
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensors": {"self_attn.q_proj.lora_A.weight": (4, 575)}}, r"3\..*q_proj.lora_A.weight is \[4, 575\]"),
        ({"tensors": {"self_attn.k_proj.lora_B.weight": (190, 4)}}, r"k_proj.lora_B.weight is \[190, 4\].*\[192, r\]"),
        ({"tensors": {"self_attn.q_proj.lora_B.weight": None}}, "q_proj.lora_A.weight without its other half"),
        ({"tensors": {"mlp.gate.lora_A.weight": (4, 576), "mlp.gate.lora_B.weight": (8, 4)}}, r"mlp.gate\. Adapters"),
        ({"tensors": {"self_attn.q_proj.lora_A.weight": (5, 576)}}, "do not fit each other"),
        ({"tensors": {"input_layernorm.weight": (576,)}}, r"3\.input_layernorm.weight replaces one of the model's"),
        ({"tensors": {"mlp.up_proj.weight": (1536, 576)}}, r"has .*lora_A.weight beside .*3\.mlp.up_proj.weight"),
        ({"tensors": {EMBEDDING: (128, 576)}}, r"embed_tokens.weight is \[128, 576\].*takes \[49152, 576\]"),
        (
            {"tensors": {f"{FACTORS}_A": (4, 49152), f"{FACTORS}_B": (575, 4)}},
            r"lora_embedding_B is \[575, 4\].*takes \[576, r\]",
        ),
        (
            {"tensors": {"self_attn.q_proj.lora_embedding_A": (4, 576), "self_attn.q_proj.lora_A.weight": None}},
            "q_proj.lora_B.weight is of|lora_embedding_A.*one is enough",
        ),
        ({"tensors": {"self_attn.q_proj.lora_C.bogus": (4, 4)}}, "LoRA adapters have no tensor"),
        ({"tensors": {"self_attn.q_proj.lora_A.weight": ()}}, "q_proj.lora_A.weight is a single number"),
        ({"rank_pattern": {"q_proj": 8}}, "q_proj.lora_A.weight has rank 4, and the configuration says 8"),
        ({"peft_type": "IA3"}, "peft_type 'IA3' is not built"),
        *(
            ({"init_lora_weights": name}, f"init_lora_weights '{name}' changes the model's own weights")
            for name in ("pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga")
        ),
        ({"modules_to_save": ["lm_head"]}, "has no weight of lm_head, which modules_to_save names"),
        ({"use_dora": True}, "lacks a lora_magnitude_vector"),
        ({"lora_alpha": "x"}, "lora_alpha must be a positive number"),
        ({"alpha_pattern": {"q_proj": 0}}, "the alpha of .*q_proj must be a positive number, got '0'"),
        ({"rank_pattern": {"([a-z_.0-9]+)+!": 4}}, "may take too long to match"),  # it would hold the interpreter
        ({"rank_pattern": {"(a|a)(a|aa)" * 15: 4}}, "may take too long to match"),
        ({"rank_pattern": {"(": 4}}, "is no regular expression"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(
    llm: LLM, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    asked = LoRARequest("broken", 9, str(broken(tmp_path / "broken", **changes)))
    with pytest.raises(RequestError, match=message) as caught:
        llm.generate(PROMPT, params(), use_tqdm=False, lora_request=asked)
    assert (caught.value.status, caught.value.param) == (400, "model")
    assert llm.generate(PROMPT, params(), use_tqdm=False), "nothing else is disturbed"


def test_adapters_that_are_not_there_or_too_large_are_refused(llm: LLM, tmp_path: Path) -> None:
    large = write_random_adapter(tmp_path / "large", 0, rank=17, layers=[0], modules=["mlp.down_proj"])
    empty = tmp_path / "empty"
    empty.mkdir()
    for path, message in (
        (large, "has rank 17, and --max-lora-rank is 16"), (empty, "has no adapter_config.json"),
        (tmp_path / "none", "neither a folder nor"), ("x" * 5000, "File name too long"),
        ("~no such user/x", "there is no adapter at ~no such user"),
    ):  # fmt: skip
        with pytest.raises(RequestError, match=message):
            llm.generate(PROMPT, params(), use_tqdm=False, lora_request=LoRARequest("x", 1, str(path)))
    truncated = write_random_adapter(tmp_path / "truncated", 0)
    weights = truncated / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(RequestError, match="damaged or truncated"):
        llm.generate(PROMPT, params(), use_tqdm=False, lora_request=LoRARequest("x", 1, str(truncated)))
    with pytest.raises(RequestError, match="2 lora_requests for 1 prompts"):
        llm.generate([PROMPT], params(), lora_request=[None, None])


ONE_PLACE: dict[str, Any] = {
    "max_model_len": 64, "num_gpu_blocks_override": 16, "enable_lora": True, "max_loras": 1, "max_cpu_loras": 1
}  # fmt: skip
IS_FULL = "all 1 places .* have adapters that are pinned"


def test_what_is_pinned_stays_so_while_an_engine_sleeps(adapters: list[LoRARequest]) -> None:
    with LLM(**ONE_PLACE) as llm:
        assert llm.llm_engine.add_lora(adapters[0]) and llm.llm_engine.pin_lora(1)
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            with pytest.raises(RequestError, match=IS_FULL):
                llm.generate(PROMPT, params(1), use_tqdm=False, lora_request=adapters[1])
        llm.sleep(2)
        assert llm.llm_engine.remove_lora(1)
        llm.wake_up()
        assert llm.generate(PROMPT, params(1), use_tqdm=False, lora_request=adapters[1])
        llm.sleep(1)
        llm.close()
        llm.wake_up()
        with pytest.raises(OctavoError, match="or has been closed"):
            llm.generate(PROMPT, params(1))


@pytest.mark.long
@pytest.mark.parametrize("is_removed", [False, True])
def test_what_is_pinned_stays_so_when_a_core_is_followed_by_another(
    adapters: list[LoRARequest], is_removed: bool
) -> None:
    """One that is killed, and one that sleeps; unless it was removed meanwhile."""

    async def use(engine: AsyncLLMEngine) -> None:
        await engine.wait_ready()
        assert await engine.add_lora(adapters[0]) and await engine.pin_lora(1)
        for is_killed in (True, False):
            if is_killed:
                engine._supervisor.core.kill()
                await until(lambda: not engine.is_ready)
                await until(lambda: engine.is_ready)
            else:
                await engine.sleep(2)
                if is_removed:
                    assert await engine.remove_lora(1)
                await engine.wake_up()
            with (
                contextlib.nullcontext() if is_removed and not is_killed else pytest.raises(RequestError, match=IS_FULL)
            ):
                async for _ in engine.generate(PROMPT, params(1), "r", adapters[1]):
                    pass

    engine = make_engine(EngineArgs(**ONE_PLACE).create_engine_config(), max_restarts=1)
    assert isinstance(engine, AsyncLLMEngine)
    try:
        asyncio.run(asyncio.wait_for(use(engine), within(240)))
    finally:
        engine.shutdown()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"lora_modules": ["a=b"]}, "--lora-modules needs --enable-lora"),
        ({"lora_memory_gb": 1.0}, "--lora-memory-gb needs --enable-lora"),
        ({"max_lora_rank": 64}, "--max-lora-rank needs --enable-lora"),
        ({"max_loras": 2}, "--max-loras needs --enable-lora"),
        ({"enable_lora": True, "max_lora_rank": 513}, "must be at most 512"),
        ({"enable_lora": True, "max_loras": 4, "max_cpu_loras": 3}, "--max-cpu-loras 3 is less than --max-loras 4"),
        ({"enable_lora": True, "fully_sharded_loras": True}, "not built"),
        ({"enable_lora": True, "lora_root": ["/nowhere at all"]}, "is no folder"),
        ({"enable_lora": True, "lora_modules": ["just a name"]}, "must be name=path"),
        ({"enable_lora": True, "lora_modules": ['{"name": "a"}']}, "must be name=path"),
    ],
)
def test_flags_that_cannot_be_honoured(flags: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(**flags)


def test_without_the_flag_there_are_no_adapters(adapters: list[LoRARequest]) -> None:
    llm = LLM(max_model_len=64, num_gpu_blocks_override=16)
    with pytest.raises(RequestError, match="needs --enable-lora"):
        llm.generate(PROMPT, lora_request=adapters[0])
