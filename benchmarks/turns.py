"""The share of agents' histories in the prefix cache: `python benchmarks/turns.py [--conversations 20] [--turns 43]`.

Agents with tools and reasoning talk by chat completions, Responses and Messages, in turn, to a tiny model that says
random tokens: reasoning of up to 40 tokens, then a call, which a grammar forces, with blanks and keys as they come.
Random tokens are the hardest case, as hardly any text has them again when it is tokenized. Printed is the share of the
tokens of each prompt's history, the prompt before it and its answer, that were cached: with the server's own tokens in
the history, and with those that the chat template's text makes (`reuse_answers` false). It bounds the work, not the
time: the cache has room for all.

`--restart`: the server keeps its cache on disk and the tokens of answers in a store, and is stopped and started again
before the last two turns. Printed are also the seconds to the first token in the turns around it, and the share of the
history that was cached in the first turn behind it. Before that turn three other agents take one, as a server that has
started compiles grammars first, with a cache on disk or without.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from octavo.loading.default_model import default_model_path
from octavo.loading.tokenizer import read_tokenizer
from tests.e2e.server import Server, running_server

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "initializer_range": 0.02,
}  # fmt: skip
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}"
    "{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "\n</tool_call>{{ '\n' if not loop.last }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n"
    "{{ '\n</think>\n\n' if enable_thinking is defined and not enable_thinking }}{% endif %}"
)
SCHEMA = {
    "type": "object", "required": ["path", "lines", "pattern"], "additionalProperties": False,
    "properties": {
        "path": {"type": "string", "maxLength": 40}, "lines": {"type": "array", "items": {"type": "integer"}},
        "pattern": {"type": "string", "maxLength": 60},
    },
}  # fmt: skip
WORDS = ("file", "read", "functions", "listed", "below", "with", "lines", "on", "which", "they", "begin", "has")
NUM_REASONING, NUM_ANSWER = 40, 1000  # tokens at most


def write_model(folder: Path) -> None:
    """Write a model without weights: its tokenizer is the default model's, with marks of reasoning."""
    tokenizer = read_tokenizer(str(default_model_path()))
    backend = tokenizer.backend_tokenizer
    backend.add_tokens(["<think>", "</think>"])
    backend.save(str(folder / "tokenizer.json"))
    ends = {"bos_token_id": 1, "eos_token_id": backend.token_to_id("<|im_end|>")}
    (folder / "config.json").write_text(json.dumps({**CONFIG, **ends, "vocab_size": backend.get_vocab_size()}))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": TEMPLATE})
    )


class Agent:
    """One conversation. `ask` is one of the functions below."""

    def __init__(self, number: int, ask: Ask, reuses: bool) -> None:
        self.random, self.ask = random.Random(number), ask
        self.sent: list[dict[str, Any]] = [{"role": "user", "content": f"Agent {number}: {self.text(60)}."}]
        self.fields = {"temperature": 1.0, "seed": number, "reuse_answers": reuses}
        self.num_history = self.num_cached = self.num_known = 0

    def text(self, num_words: int) -> str:
        return " ".join(self.random.choices(WORDS, k=num_words))

    async def run(self, http: httpx.AsyncClient, num_turns: int) -> None:
        for _ in range(num_turns):
            if isinstance(self.fields["seed"], int):
                self.fields["seed"] += 1000
            num_prompt, num_cached, num_answer = await self.ask(self, http)
            self.num_history += self.num_known
            self.num_cached += min(num_cached, self.num_known)
            self.num_known = num_prompt + num_answer


Ask = Callable[[Agent, httpx.AsyncClient], Awaitable[tuple[int, int, int]]]


async def post(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = await http.post(path, json=body)
    if answer.status_code != 200:
        raise SystemExit(f"{path}: {answer.status_code} {answer.text}")
    found: dict[str, Any] = answer.json()
    return found


async def by_chats(agent: Agent, http: httpx.AsyncClient) -> tuple[int, int, int]:
    tool = {"type": "function", "function": {"name": "read", "parameters": SCHEMA}}
    made = await post(http, "/v1/chat/completions", {
        "messages": agent.sent, "tools": [tool], "tool_choice": "required", "max_tokens": NUM_ANSWER,
        "thinking_token_budget": NUM_REASONING, **agent.fields,
    })  # fmt: skip
    message, usage = made["choices"][0]["message"], made["usage"]
    sent = {name: message[name] for name in ("role", "content", "reasoning_content", "tool_calls")}
    agent.sent.append({name: value for name, value in sent.items() if value is not None})
    for call in message["tool_calls"] or ():
        agent.sent.append({"role": "tool", "tool_call_id": call["id"], "content": agent.text(100)})
    if not message["tool_calls"]:
        agent.sent.append({"role": "user", "content": agent.text(20)})
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], usage["completion_tokens"]


async def by_responses(agent: Agent, http: httpx.AsyncClient) -> tuple[int, int, int]:
    tool = {"type": "function", "name": "read", "parameters": SCHEMA}
    made = await post(http, "/v1/responses", {
        "input": agent.sent, "tools": [tool], "tool_choice": "required", "max_output_tokens": NUM_ANSWER,
        "store": False, "reasoning": {"effort": "none"}, **agent.fields,
    })  # fmt: skip
    agent.sent += made["output"]
    calls = [item for item in made["output"] if item["type"] == "function_call"]
    for call in calls:
        agent.sent.append({"type": "function_call_output", "call_id": call["call_id"], "output": agent.text(100)})
    if not calls:
        agent.sent.append({"role": "user", "content": agent.text(20)})
    usage = made["usage"]
    return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"], usage["output_tokens"]


async def by_messages(agent: Agent, http: httpx.AsyncClient) -> tuple[int, int, int]:
    fields = {name: value for name, value in agent.fields.items() if name != "seed"}
    made = await post(http, "/v1/messages", {
        "model": "tiny", "messages": agent.sent, "tools": [{"name": "read", "input_schema": SCHEMA}],
        "tool_choice": {"type": "any"}, "max_tokens": NUM_ANSWER,
        "thinking": {"type": "enabled", "budget_tokens": NUM_REASONING}, **fields,
    })  # fmt: skip
    agent.sent.append({"role": "assistant", "content": made["content"]})
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": agent.text(100)}
        for block in made["content"] if block["type"] == "tool_use"
    ]  # fmt: skip
    agent.sent.append({"role": "user", "content": results or agent.text(20)})
    usage = made["usage"]
    num_cached = usage.get("cache_read_input_tokens") or 0
    return usage["input_tokens"] + num_cached, num_cached, usage["output_tokens"]


ASKS: list[Ask] = [by_chats, by_responses, by_messages]


def make_agents(count: int, reuses: bool) -> list[Agent]:
    return [Agent(i + (0 if reuses else 500), ASKS[i % 3], reuses) for i in range(count)]


async def talk(url: str, agents: list[Agent], num_turns: int) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=600) as http, asyncio.TaskGroup() as group:
        for agent in agents:
            group.create_task(agent.run(http, num_turns))


def report(agents: list[Agent], about: str) -> None:
    print(about)
    for ask in ASKS:
        own = [agent for agent in agents if agent.ask is ask]
        num_history = sum(agent.num_history for agent in own)
        share = sum(agent.num_cached for agent in own) / max(num_history, 1)
        print(f"  {ask.__name__:14}{share:8.2%} of {num_history} tokens of history")
    num_history = sum(agent.num_history for agent in agents)
    print(f"  together      {sum(agent.num_cached for agent in agents) / num_history:8.2%}")
    for agent in agents:
        agent.num_history = agent.num_cached = 0


def first_token_s(server: Server, agents: list[Agent]) -> float:
    """Let every agent take a turn. Returns the mean of their seconds to the first token."""
    name = "vllm:time_to_first_token_seconds"
    before = [server.count(f"{name}_{what}") for what in ("sum", "count")]
    asyncio.run(talk(server.url, agents, 1))
    sum_s, count = (server.count(f"{name}_{what}") - one for what, one in zip(("sum", "count"), before, strict=True))
    return sum_s / count


def restart(folder: Path, flags: list[str], agents: list[Agent], num_turns: int) -> None:
    flags = [*flags, "--kv-cache-disk", str(folder / "disk"), "--response-store", str(folder / "store.db")]
    with running_server(folder, *flags) as server:
        asyncio.run(talk(server.url, agents, num_turns - 3))
        before_s = first_token_s(server, agents)
        report(agents, "before the restart")
    with running_server(folder, *flags) as server:
        asyncio.run(talk(server.url, make_agents(len(ASKS), False), 1))
        after_s = first_token_s(server, agents)
        report(agents, "in the first turn after it")
        later_s = first_token_s(server, agents)
    print(f"first token: {before_s:.3f} s before, {after_s:.3f} s in the first turn after, {later_s:.3f} s in the next")
    print(f"after over before: {after_s / before_s:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=20)
    parser.add_argument("--turns", type=int, default=43)
    parser.add_argument("--restart", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder)
        flags = [
            "--model", name, "--load-format", "dummy", "--served-model-name", "tiny", "--max-model-len", "32768",
            "--max-num-seqs", "8", "--kv-cache-memory-bytes", str(1 << 30), "--enable-prompt-tokens-details",
            "--disable-log-requests",
        ]  # fmt: skip
        if args.restart:
            restart(folder, flags, make_agents(args.conversations, True), args.turns)
            return
        with running_server(folder, *flags) as server:
            for reuses in (True, False):
                asyncio.run(talk(server.url, agents := make_agents(args.conversations, reuses), args.turns))
                report(agents, "own tokens in the history" if reuses else "tokens of the template's text")


if __name__ == "__main__":
    main()
