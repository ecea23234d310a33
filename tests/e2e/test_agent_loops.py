"""Agents of other people's clients in loops of twenty turns, over six formats of calls that chat templates force.

The engine plays a model that writes its calls in the template's format, one byte a token. So every mark is cut in every
place, and what is lost or shown in the wrong place is the server's fault. See clients/agent_loops.py for the loops.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.entrypoints.chat.tools.call_spelling import written_calls
from octavo.entrypoints.chat.tools.format_detection import model_formats
from octavo.request import EngineRequest
from tests.e2e.clients.agent_loops import FAILURE, LOOPS, plan
from tests.e2e.test_clients import CLIENTS
from tests.entrypoints.chat.tools.test_format_detection import INVOKE, OBJECT, QWEN_TAGS, THINK, chat, each
from tests.entrypoints.fake_engine import FakeEngine, serving
from tests.installing import why_not

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

SAYS = "{{ m.content or '' }}"
BEGIN = "<|im_start|>"
KIMI = "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ f.arguments | tojson }}<|tool_call_end|>"
FORMATS = {
    "hermes": chat(THINK + each(f"<tool_call>\n{OBJECT}\n</tool_call>", "\n"), answer=THINK),
    "qwen3_coder": chat(SAYS + each(QWEN_TAGS, "\n"), answer=SAYS),
    "mistral": chat(SAYS + each("[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}"), answer=SAYS),
    "kimi_k2": chat(
        SAYS + "<|tool_calls_section_begin|>" + each(KIMI) + "<|tool_calls_section_end|>", answer=SAYS
    ),
    "minimax_m2": chat(SAYS + f"<minimax:tool_call>\n{each(INVOKE)}</minimax:tool_call>", answer=SAYS),
    "deepseek_v31": chat(
        SAYS + "<｜tool▁calls▁begin｜>" + each(
            "<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>{{ f.arguments | tojson }}<｜tool▁call▁end｜>"
        ) + "<｜tool▁calls▁end｜>", answer=SAYS,
    ),
}  # fmt: skip


class Agents(FakeEngine):
    """Plays the model of any number of agents at once, each of which is found by its task in the prompt."""

    def __init__(self, tokenizer_folder: Path, template: str) -> None:
        super().__init__(tokenizer_folder, max_model_len=100_000)
        self.tokenizer.chat_template = template
        self.formats = model_formats(self.tokenizer)
        self.problems: list[str] = []

    def answer_to(self, request: EngineRequest) -> str:
        prompt = str(self.tokenizer.decode(request.prompt.token_ids))
        [name] = re.findall(r"Do the task of agent <(.*?)>", prompt)
        turns, turn = plan(name), prompt.count(f"{BEGIN}assistant\n") - 1
        said, calls = turns[turn]
        earlier = [call for _, done in turns[:turn] for call in done]
        results = re.findall(r"result of \d+\.\d+|" + FAILURE, prompt)
        if len(results) != len(earlier):
            self.problems.append(f"{name}, turn {turn}: {len(results)} results of {len(earlier)} calls")
        if earlier and (lost := [text for text, _ in turns[:turn] if text and text not in prompt]):
            self.problems.append(f"{name}, turn {turn}: not in the history: {lost}")
        assert self.formats.tools is not None
        style = self.formats.reasoning
        thought = "" if style is None else f"{style.start}\nTo think of {name}.\n{style.end}\n\n"
        return thought + said + (written_calls(self.formats.tools, calls) if calls else "")


@pytest.fixture(scope="module")
def servers(tiny_tokenizer: Path) -> Iterator[dict[str, tuple[str, Agents]]]:
    with contextlib.ExitStack() as stack:
        found = {}
        for name, template in FORMATS.items():
            engine = Agents(tiny_tokenizer, template)
            found[name] = stack.enter_context(serving(engine, disable_log_requests=True)), engine
        yield found


@pytest.mark.parametrize("client", LOOPS)
def test_no_loop_loses_a_call_or_shows_a_mark(
    servers: dict[str, tuple[str, Agents]], client: str, tmp_path: Path
) -> None:
    outside: Any = {
        "cwd": tmp_path,
        "env": {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")},
    }
    python = [sys.executable]
    if client in ("langchain", "pydantic_ai"):
        if shutil.which("uv") is None:
            pytest.skip("uv is not installed")
        given = [word for requirement in CLIENTS[client].split() for word in ("--with", requirement)]
        python = ["uv", "run", "--no-project", *given, "python"]
        if reason := why_not([*python, "-c", ""], **outside):
            pytest.skip(f"{client} cannot be installed here: {reason}")
    program = Path(__file__).parent / "clients" / "agent_loops.py"
    urls = [url for url, _ in servers.values()]
    done = subprocess.run([*python, str(program), client, *urls], capture_output=True, text=True, **outside)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-3000:]
    assert done.stdout == f"{len(LOOPS[client]) * len(FORMATS)} loops\n"
    for _, engine in servers.values():
        own = [one for one in engine.problems if one.startswith(f"{client} ")]
        assert not own, own[:5]
