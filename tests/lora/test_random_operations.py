"""Files, threads and a real model: adapters come, are replaced under their names and go while requests run and are
aborted. What is served is what the files held when it was asked for."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from octavo import LLM, SamplingParams
from octavo.errors import RequestError
from octavo.lora.request import LoRARequest
from octavo.request import AdapterSource
from tests.models.small_experts import ALL_MODELS
from tests.models.small_models import VOCAB

NUM_CONTENTS = 9
BROKEN = NUM_CONTENTS  # the number of the contents that nobody can read
NUM_TOKENS = 6
PLACES = 4


@pytest.fixture(scope="module")
def llm(tiny_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return small_llm(tiny_tokenizer, tmp_path_factory.mktemp("model"))


def small_llm(tokenizer: Path, folder: Path, **settings: Any) -> LLM:
    small = ALL_MODELS["llama ratio 3, head 64, tied"]
    small.save(small.reference(seed=1), folder)
    return LLM(
        str(folder), tokenizer=str(tokenizer), dtype="float32", max_model_len=64, block_size=8, max_num_seqs=6,
        num_gpu_blocks_override=64, check_invariants=True, enable_lora=True, max_loras=2, max_cpu_loras=PLACES,
        **settings,
    )  # fmt: skip


def write_contents(llm: LLM, folder: Path, seed: int) -> None:
    generator = np.random.default_rng(seed)
    rank, tensors = 1 + seed % 5, {}
    for matrix in llm.core.executor.worker.runner.model.matrices:  # type: ignore[attr-defined]
        for module in matrix.modules:
            name = f"base_model.model.{module.name}"
            size = module.num_out, matrix.num_in
            if matrix.replaceable and seed % 3 == 0:
                tensors[f"{name}.weight"] = generator.standard_normal(size, np.float32)
                continue
            if matrix.is_embedding:
                tensors[f"{name}.lora_embedding_A"] = generator.standard_normal((rank, size[0]), np.float32)
                tensors[f"{name}.lora_embedding_B"] = generator.standard_normal((size[1], rank), np.float32)
                continue
            tensors[f"{name}.lora_A.weight"] = generator.standard_normal((rank, matrix.num_in), np.float32)
            tensors[f"{name}.lora_B.weight"] = generator.standard_normal((module.num_out, rank), np.float32)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 0.1 * rank, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


@dataclass(slots=True)
class Asked:
    """A request under way."""

    source: AdapterSource | None
    prompt: int
    contents: int | None
    tokens: list[int] = field(default_factory=list)


class Operations:
    """Six names whose files change, two prompts, and what each contents says to each."""

    def __init__(self, llm: LLM, folder: Path) -> None:
        self.llm, self.core, self.folder, self.random = llm, llm.core, folder, random.Random(0)
        for number in range(NUM_CONTENTS):
            write_contents(llm, folder / f"contents{number}", number)
        shutil.copytree(folder / "contents0", folder / f"contents{BROKEN}")
        with open(folder / f"contents{BROKEN}" / "adapter_model.safetensors", "r+b") as file:
            file.truncate(5000)
        generator = np.random.default_rng(0)
        self.prompts = [generator.integers(3, VOCAB, 11).tolist() for _ in range(2)]
        self.params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        self.expected: dict[tuple[int | None, int], list[int]] = {}
        for number in (None, *range(NUM_CONTENTS)):
            adapter = None if number is None else LoRARequest("x", 1, str(folder / f"contents{number}"))
            outputs = llm.generate(
                [{"prompt_token_ids": prompt} for prompt in self.prompts], self.params, use_tqdm=False,
                lora_request=adapter,
            )  # fmt: skip
            for prompt, output in enumerate(outputs):
                self.expected[number, prompt] = list(output.outputs[0].token_ids)
        assert len({str(tokens) for tokens in self.expected.values()}) > NUM_CONTENTS, "contents can be told apart"
        self.names = [f"name{i}" for i in range(6)]
        self.holds: dict[str, int] = {}
        for name in self.names:
            self.replace(name)
        self.live: dict[str, Asked] = {}
        self.counts: Counter[str] = Counter()

    def replace(self, name: str) -> None:
        """Put other contents under the same name, at once: threads may be reading what is there."""
        number = self.random.choice([*range(NUM_CONTENTS), BROKEN])
        (self.folder / "next").symlink_to(self.folder / f"contents{number}")
        (self.folder / "next").replace(self.folder / name)
        self.holds[name] = number

    def source(self, name: str) -> AdapterSource:
        found = self.llm.inputs.find_adapter(LoRARequest(name, 1, str(self.folder / name)))
        assert found is not None
        return found

    def operate(self) -> None:
        weights = {"request": 5, "step": 8, "abort": 1, "reload": 1, "load": 1, "unload": 1}
        kind = self.random.choices(list(weights), list(weights.values()))[0]
        self.counts[kind] += 1
        name = self.random.choice(self.names)
        if kind == "request" and len(self.live) < 12:
            source = self.source(name) if self.random.random() < 0.8 else None
            prompt = self.random.randrange(2)
            request = self.llm.inputs.process({"prompt_token_ids": self.prompts[prompt]}, self.params, adapter=source)
            self.live[request.request_id] = Asked(source, prompt, None if source is None else self.holds[name])
            self.core.add(request)
        elif kind == "step":
            self.step()
        elif kind == "abort" and self.live:
            aborted = self.random.choice(list(self.live))
            del self.live[aborted]
            self.core.abort(aborted)
        elif kind == "reload":
            self.replace(name)
        elif kind == "load":
            self.core.load_adapter(self.source(name))
        elif kind == "unload":
            self.core.unload_adapter(self.source(name).identity)

    def step(self) -> None:
        if not self.core.has_work:
            return
        for output in self.core.step().outputs:
            asked = self.live.get(output.request_id)
            if asked is None:
                continue  # it was aborted
            if output.error is not None:
                assert asked.source is not None, output.error
                is_broken = asked.contents == BROKEN and "damaged" in output.error
                assert is_broken or "have changed since" in output.error, output.error
                self.counts["broken" if is_broken else "changed"] += 1
                del self.live[output.request_id]
                continue
            asked.tokens += output.token_ids
            assert asked.contents != BROKEN
            expected = self.expected[asked.contents, asked.prompt]
            assert asked.tokens == expected[: len(asked.tokens)], "computed with another adapter's weights or keys"
            if output.finish_reason is not None:
                assert asked.tokens == expected
                self.counts["finished"] += 1
                del self.live[output.request_id]

    def drain(self) -> None:
        while self.core.has_work:
            self.step()
        assert not self.live, "somebody was never answered"
        library, store = self.core.adapters, self.core.executor.worker.adapters  # type: ignore[attr-defined]
        assert library is not None
        library.pool.check([])
        assert not library.pool.running and len(library) <= PLACES
        assert len(store._on_host) <= PLACES, "what nobody knows is kept on the host"
        self.core.scheduler.check()


def operate(llm: LLM, folder: Path, count: int, least: Mapping[str, int]) -> None:
    """Operate `count` times, and on until each thing has happened as often as `least` says: how many requests end
    meanwhile depends on how fast threads read adapters."""
    operations = Operations(llm, folder)
    for number in range(100 * count):
        if number >= count and all(operations.counts[what] >= times for what, times in least.items()):
            break
        operations.operate()
    else:
        raise AssertionError(operations.counts)
    operations.drain()


def test_random_operations_serve_nothing_wrong(llm: LLM, tmp_path: Path) -> None:
    operate(llm, tmp_path, 300, {"finished": 20, "broken": 1, "abort": 1})


def test_adapters_have_the_memory_that_they_are_given(tiny_tokenizer: Path, tmp_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=2)
    for memory_gb in (1e-9, 1e-3):  # a page, and some
        llm = small_llm(tiny_tokenizer, tmp_path / str(memory_gb), lora_memory_gb=memory_gb)
        write_contents(llm, tmp_path / f"adapter {memory_gb}", 3)
        asked = LoRARequest("x", 1, str(tmp_path / f"adapter {memory_gb}"))
        given = {"prompt_token_ids": [3, 4, 5]}
        if memory_gb > 1e-9:
            assert llm.generate(given, params, use_tqdm=False, lora_request=asked)
            continue
        with pytest.raises(RequestError, match=r"takes 0\.1 MiB of memory, and adapters have 0\.1 MiB; raise"):
            llm.generate(given, params, use_tqdm=False, lora_request=asked)


def test_adapters_are_used_where_they_lie_on_the_host_and_nothing_points_there_once_they_are_gone(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    llm = small_llm(tiny_tokenizer, tmp_path / "model")
    store = llm.core.executor.worker.adapters  # type: ignore[attr-defined]
    write_contents(llm, tmp_path / "a", 4)
    asked = LoRARequest("a", 1, str(tmp_path / "a"))
    llm.generate({"prompt_token_ids": [3, 4, 5]}, SamplingParams(max_tokens=2), use_tqdm=False, lora_request=asked)
    identity = llm.inputs.find_adapter(asked).identity
    [image] = store._on_host[identity].pages
    begin = image.__array_interface__["data"][0]

    def addresses() -> list[int]:
        entries = [table.factors for table in store._tables]
        return [int(at) for of_table in entries for name in ("a", "b", "panels") for at in of_table[name] if at]

    assert addresses() and all(begin <= at < begin + image.nbytes for at in addresses())
    llm.core.unload_adapter(identity)  # type: ignore[attr-defined]
    assert not addresses() and identity not in store._on_host


@pytest.mark.long
def test_ten_thousand_random_operations(llm: LLM, tmp_path: Path) -> None:
    operate(llm, tmp_path, 10_000, dict.fromkeys(("finished", "broken", "abort", "reload"), 100))
