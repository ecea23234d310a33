"""Prompts that are embeddings: answers are those of the tokens that they were made of, and of `inputs_embeds` in
`transformers`."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
import transformers
from transformers import PreTrainedTokenizerFast

from octavo import LLM, SamplingParams
from octavo.errors import ConfigError, RequestError
from octavo.execution import executor
from tests.e2e.server import openai_client, served
from tests.execution.late_device import LateDevice
from tests.multimodal.test_llava import GREEDY, generate
from tests.ops import torch_ref
from tests.untimed import without_time

IDS = [84, 104, 101, 32, 99, 97, 116, 32, 115, 97, 116, 32, 111, 110, 32, 105, 116, 115, 32, 109, 97, 116]
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 259, "max_position_embeddings": 256, "head_dim": 16,
}  # fmt: skip


def saved(folder: Path, tokenizer: Path, model_type: str, **more: Any) -> Path:
    torch.manual_seed(0)
    sizes = SIZES if model_type != "gpt2" else {"vocab_size": SIZES["vocab_size"]}
    config = transformers.AutoConfig.for_model(model_type, **{**sizes, "tie_word_embeddings": False, **more})
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15)
    model.save_pretrained(folder)
    PreTrainedTokenizerFast.from_pretrained(tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    return saved(tmp_path_factory.mktemp("llama"), tiny_tokenizer, "llama")


def engine(folder: Path, **args: Any) -> LLM:
    sizes: dict[str, Any] = {"max_num_batched_tokens": 13, "max_num_seqs": 4, "num_gpu_blocks_override": 60}
    sizes |= {"dtype": "float32", "max_model_len": 128, "check_invariants": True, "enable_prompt_embeds": True}
    return LLM(str(folder), **sizes | args)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    found = engine(folder)
    yield found
    found.close()


def embedded(folder: Path, ids: list[int] = IDS) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    found: torch.Tensor = model.get_input_embeddings()(torch.tensor(ids)).detach()
    return found


def noise(seed: int, count: int = 20) -> torch.Tensor:
    return torch.randn(count, 64, generator=torch.Generator().manual_seed(seed)) * 0.2


def in_base64(tensor: torch.Tensor) -> str:
    out = io.BytesIO()
    torch.save(tensor, out)
    return base64.b64encode(out.getvalue()).decode()


def told(llm: LLM, *prompts: Any, params: SamplingParams = GREEDY) -> list[Any]:
    return [output.outputs[0].logprobs for output in generate(llm, *prompts, params=params)]


@pytest.mark.parametrize(
    ("model_type", "more"),
    [
        pytest.param("llama", {}, marks=pytest.mark.long),
        ("granite", {"embedding_multiplier": 3.0}),  # transformers multiplies what is given
        pytest.param("gemma2", {"query_pre_attn_scalar": 16}, marks=pytest.mark.long),  # and here its embedding does
        # Positions of its own are added to what is given.
        ("gpt2", {"n_embd": 64, "n_inner": 96, "n_layer": 2, "n_head": 4, "n_positions": 256}),
    ],
)
def test_they_are_what_transformers_takes(
    tmp_path: Path, tiny_tokenizer: Path, model_type: str, more: dict[str, Any]
) -> None:
    folder = saved(tmp_path / model_type, tiny_tokenizer, model_type, **more)
    llm = engine(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    rows = noise(0)
    expected = model.generate(
        inputs_embeds=rows[None], attention_mask=torch.ones(1, len(rows)), max_new_tokens=8, do_sample=False,
        eos_token_id=None, repetition_penalty=1.3, output_scores=True, return_dict_in_generate=True, pad_token_id=0,
    )  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=8, repetition_penalty=1.3, logprobs=3, ignore_eos=True)
    [output] = generate(llm, {"prompt_embeds": rows}, params=params)
    assert output.outputs[0].token_ids == expected.sequences[0].tolist()  # of no tokens but its own
    [of_ids] = told(llm, {"prompt_token_ids": IDS})
    [of_rows] = told(llm, {"prompt_embeds": embedded(folder)})
    for one, other in zip(of_ids, of_rows, strict=True):
        assert {token: pytest.approx(x.logprob, abs=1e-5) for token, x in one.items()} == {
            token: x.logprob for token, x in other.items()
        }
    llm.close()


def test_they_are_found_again_and_are_nobody_else_s(llm: LLM, folder: Path) -> None:
    rows = embedded(folder)
    prompts: list[Any] = [{"prompt_embeds": rows}, {"prompt_embeds": noise(1)}, {"prompt_token_ids": [0] * len(IDS)}]
    llm.reset_prefix_cache()
    alone = told(llm, *prompts)
    assert len({str(one) for one in alone}) == 3
    again = generate(llm, *prompts)
    assert [output.outputs[0].logprobs for output in again] == alone
    assert all(output.num_cached_tokens >= 16 for output in again)
    assert again[0].prompt_token_ids == [0] * len(IDS)
    [salted] = generate(llm, {**prompts[0], "cache_salt": "x"})
    assert (salted.num_cached_tokens, salted.outputs[0].logprobs) == (0, alone[0])
    for given in (rows.numpy(), rows[None], in_base64(rows)):
        assert told(llm, {"prompt_embeds": given}) == alone[:1]
    half = told(llm, {"prompt_embeds": rows.bfloat16()})
    assert half == told(llm, {"prompt_embeds": rows.bfloat16().float()}) != alone[:1]


@pytest.mark.long
@pytest.mark.parametrize(
    "more",
    [
        {"pipeline_parallel_size": 2},
        {"tensor_parallel_size": 2},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}},
        {"num_gpu_blocks_override": 9, "enable_prefix_caching": False},
        "a draft model",
        "late",
    ],
    ids=str,
)
def test_answers_are_the_same(
    monkeypatch: pytest.MonkeyPatch, llm: LLM, folder: Path, draft_model: Path, more: Any
) -> None:
    prompts: list[Any] = [{"prompt_embeds": noise(seed)} for seed in range(3)] + [{"prompt_token_ids": IDS}]
    params = SamplingParams(temperature=0, max_tokens=40, logprobs=2, ignore_eos=True)
    llm.reset_prefix_cache()
    expected = told(llm, *prompts, params=params)
    is_late = more == "late"
    if is_late:
        monkeypatch.setattr(executor, "_open_device", lambda config, worker_group: (LateDevice(1), torch_ref))
        more = {}
    elif more == "a draft model":
        more = {"speculative_config": {"model": str(draft_model), "num_speculative_tokens": 2}}
    other = engine(folder, **more)
    without_time(other.core)  # type: ignore[arg-type]
    generate(other, *prompts)  # so that no rows have to be waited for
    outputs = generate(other, *prompts, params=params)
    other.close()
    if "num_gpu_blocks_override" in more:
        assert sum(output.metrics.num_preemptions for output in outputs) > 0
    for output, should_be in zip(outputs, expected, strict=True):
        if not is_late:
            assert output.outputs[0].logprobs == should_be
        else:
            for one, two in zip(output.outputs[0].logprobs, should_be, strict=True):
                assert {t: pytest.approx(x.logprob, abs=1e-3) for t, x in two.items()} == {
                    t: x.logprob for t, x in one.items()
                }


TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def test_chats_have_them_between_texts(llm: LLM, folder: Path) -> None:
    """A part that is the embeddings of a text is that text; others make another answer."""
    tokenizer = llm.get_tokenizer()

    def embeds(text: str) -> dict[str, Any]:
        return {"type": "prompt_embeds", "data": embedded(folder, tokenizer.encode(text))}

    def answer(*messages: tuple[str, Any]) -> Any:
        conversation = [{"role": role, "content": content} for role, content in messages]
        [output] = llm.chat(conversation, GREEDY, use_tqdm=False, chat_template=TEMPLATE)
        return output

    llm.reset_prefix_cache()
    as_text = answer(("system", "cat"), ("user", "on\nits mat\non"))
    text = {"type": "text", "text": "on"}
    mixed = answer(("system", [embeds("cat")]), ("user", [text, embeds("its mat"), text]))
    for one, other in zip(as_text.outputs[0].logprobs, mixed.outputs[0].logprobs, strict=True):
        assert {token: pytest.approx(x.logprob, abs=1e-5) for token, x in one.items()} == {
            token: x.logprob for token, x in other.items()
        }
    assert len(mixed.prompt_token_ids) == len(as_text.prompt_token_ids)
    again = answer(("system", [embeds("cat")]), ("user", [text, embeds("its mat"), text]))
    assert again.num_cached_tokens >= 16 and again.outputs[0].logprobs == mixed.outputs[0].logprobs
    other = answer(("system", [embeds("cat")]), ("user", [text, embeds("its hat"), text]))
    assert other.outputs[0].logprobs != mixed.outputs[0].logprobs
    for part, reason in (
        ({"type": "prompt_embeds"}, "has a part that is not like"),
        ({"type": "prompt_embeds", "data": "%%%"}, "not base64 of one tensor"),
        ({"type": "prompt_embeds", "data": torch.zeros(128, 64)}, "shorten it"),
    ):
        with pytest.raises(RequestError, match=reason):
            answer(("user", [part]))
    with pytest.raises(RequestError, match="does not have every part of type prompt_embeds once"):
        llm.chat([{"role": "user", "content": [embeds("cat")]}], chat_template="none", use_tqdm=False)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "other sizes": ({"prompt_embeds": torch.zeros(4, 32)}, r"prompt_embeds have the shape \[4, 32\]; this model takes"),
    "none": ({"prompt_embeds": torch.zeros(0, 64)}, "have the shape"),
    "too many": ({"prompt_embeds": torch.zeros(128, 64)}, "128 tokens and the model takes 128 of prompt and output"),
    "no numbers": ({"prompt_embeds": torch.full((4, 64), torch.nan)}, "not finite numbers"),
    "whole numbers": ({"prompt_embeds": torch.zeros(4, 64, dtype=torch.int64)}, "are of int64"),
    "no base64": ({"prompt_embeds": "%%%"}, "not base64 of one tensor"),
    "between no texts": ({"prompt_embeds": [torch.zeros(4, 64)], "prompt": ["a"]}, "prompt must be a list of texts"),
    "beside tokens": ({"prompt_embeds": torch.zeros(4, 64), "prompt_token_ids": [1]}, "leave prompt_token_ids out"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_prompt_is_refused(llm: LLM, name: str) -> None:
    prompt, reason = WRONG[name]
    with pytest.raises(RequestError, match=reason):
        generate(llm, prompt)


def test_they_are_asked_for_by_a_flag(llm: LLM, folder: Path, llava: Path, draft_model: Path) -> None:
    with pytest.raises(RequestError, match="prompt_logprobs needs tokens"):
        generate(llm, {"prompt_embeds": noise(0)}, params=SamplingParams(prompt_logprobs=1))
    without = engine(folder, enable_prompt_embeds=False)
    with pytest.raises(RequestError, match="needs --enable-prompt-embeds"):
        generate(without, {"prompt_embeds": noise(0)})
    without.close()
    with pytest.raises(ConfigError, match="not built yet for models that see or hear"):
        engine(llava)
    with pytest.raises(ConfigError, match="not built yet for a draft head"):
        engine(folder, speculative_config={"method": "eagle", "model": str(draft_model)})


@pytest.mark.long
@pytest.mark.slow
def test_completions_take_them(tmp_path: Path, llm: LLM, folder: Path) -> None:
    rows, texts = [noise(0), noise(1)], {}
    llm.reset_prefix_cache()
    expected = [output.outputs[0].text for output in generate(llm, *({"prompt_embeds": one} for one in rows), "a b c")]
    options: Any = {"model": "m", "temperature": 0, "max_tokens": 8}
    extra = {"ignore_eos": True}
    with (
        served(
            tmp_path, "--model", str(folder), "--served-model-name", "m", "--dtype", "float32",
            "--num-gpu-blocks-override", "64", "--max-model-len", "128", "--enable-prompt-embeds",
            "--chat-template", TEMPLATE,
        ) as server,
        openai_client(server) as client,
    ):  # fmt: skip
        given = [in_base64(one) for one in rows]
        for name, prompt, embeds in (
            ("one", "", given[0]), ("two", None, given), ("beside a text", "a b c", given),
        ):  # fmt: skip
            made = client.completions.create(prompt=prompt, extra_body={**extra, "prompt_embeds": embeds}, **options)
            texts[name] = [choice.text for choice in made.choices]
        assert made.usage is not None and made.usage.prompt_tokens == 40 + 5
        stream = client.completions.create(
            prompt="", stream=True, extra_body={**extra, "prompt_embeds": given[0]}, **options
        )
        texts["streamed"] = ["".join(chunk.choices[0].text for chunk in stream)]
        for more, reason in (
            ({"prompt_embeds": "x"}, "not base64 of one tensor"),
            ({"prompt_embeds": given[0], "echo": True}, "echo repeats a prompt's text"),
            ({"prompt_embeds": given[0], "prompt_logprobs": 1}, "prompt_logprobs is of tokens"),
        ):
            with pytest.raises(openai.BadRequestError, match=reason):
                client.completions.create(prompt="", extra_body=more, **options)
        with pytest.raises(openai.BadRequestError, match="prompt"):
            client.completions.create(prompt=None, **options)
        part: Any = {"type": "prompt_embeds", "data": given[0]}
        messages: Any = [{"role": "system", "content": [part]}, {"role": "user", "content": "a b"}]
        chat = client.chat.completions.create(messages=messages, extra_body=extra, **options)
        texts["chat"] = [chat.choices[0].message.content]
        for path, sent in (
            ("/tokenize", messages),
            ("/v1/chat/completions", [{"role": "user", "content": [{**part, "data": 7}]}]),
            ("/v1/chat/completions", [{"role": "user", "content": [{**part, "uuid": "x"}]}]),
        ):
            refused = httpx.post(server.url + path, json={"model": "m", "messages": sent}, timeout=60)
            assert refused.status_code == 400 and "prompt_embeds" in refused.json()["error"]["message"], refused.text
    alike: Any = [{"role": "system", "content": [{**part, "data": rows[0]}]}, messages[1]]
    [told_here] = llm.chat(alike, GREEDY, use_tqdm=False, chat_template=TEMPLATE)
    assert chat.usage is not None and chat.usage.prompt_tokens == len(told_here.prompt_token_ids)
    assert json.dumps(texts) == json.dumps(
        {
            "one": expected[:1],
            "two": expected[:2],
            "beside a text": expected,
            "streamed": expected[:1],
            "chat": [told_here.outputs[0].text],
        }
    )
