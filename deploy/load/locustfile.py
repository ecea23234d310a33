"""Load for any server of OpenAI's API, with the time to first token as a row of its own:

    pip install locust
    locust -f deploy/load/locustfile.py --headless --host http://localhost:8000 --users 16 --spawn-rate 4 --run-time 2m

Users send a chat, a completion or a stream, then wait for a moment. `ramp.py` and `soak.py` say how many users there
are at which time.
"""

from __future__ import annotations

import json
import random
import time
from typing import Any

import gevent
from locust import HttpUser, between, events, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment

WORDS = (
    "river",
    "stone",
    "light",
    "answer",
    "garden",
    "winter",
    "letter",
    "engine",
    "morning",
    "paper",
    "harbour",
    "music",
)


@events.init_command_line_parser.add_listener
def _options(parser: LocustArgumentParser) -> None:
    parser.add_argument("--model-name", default="", help="Default: the first that the server lists.")
    parser.add_argument(
        "--api-key", default="", env_var="OPENAI_API_KEY", is_secret=True, help="Sent as a bearer token."
    )
    parser.add_argument("--prompt-words", type=int, default=64, help="Of each prompt, at random.")
    parser.add_argument("--max-tokens", type=int, default=64, help="Of each answer.")
    parser.add_argument("--stop-after", type=int, default=0, help="Requests after which the test ends; 0: it does not.")


@events.init.add_listener
def _stop_after(environment: Environment, **_: Any) -> None:
    """End the test by the number of requests, whose rows of first tokens do not count."""

    num_drafted, options = 0, environment.parsed_options

    def count(request_type: str, **_: Any) -> None:
        nonlocal num_drafted
        if request_type != "POST" or options is None or environment.runner is None:
            return
        num_drafted += 1
        if num_drafted == options.stop_after:
            gevent.spawn(environment.runner.quit)  # which ends the greenlet that this is called from

    environment.events.request.add_listener(count)


class Client(HttpUser):
    """Somebody who reads for a moment between two requests."""

    wait_time = between(0.1, 1.0)

    def on_start(self) -> None:
        options = self.environment.parsed_options
        if options.api_key:
            self.client.headers["Authorization"] = f"Bearer {options.api_key}"
        self.max_tokens, self.prompt_words = options.max_tokens, options.prompt_words
        self.model = options.model_name or self.client.get("/v1/models").json()["data"][0]["id"]

    def prompt(self) -> str:
        return "Write about these: " + " ".join(random.choices(WORDS, k=self.prompt_words))

    def body(self, **own: object) -> dict[str, object]:
        return {"model": self.model, "max_tokens": self.max_tokens, **own}

    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.prompt()}]

    @task(3)
    def chat(self) -> None:
        self.client.post("/v1/chat/completions", json=self.body(messages=self.messages()), name="chat")

    @task(1)
    def completion(self) -> None:
        self.client.post("/v1/completions", json=self.body(prompt=self.prompt()), name="completion")

    @task(6)
    def stream(self) -> None:
        """A chat as it comes. One that ends without its last line has failed."""
        body, begun, first_s = self.body(messages=self.messages(), stream=True), time.perf_counter(), None
        with self.client.post(
            "/v1/chat/completions", json=body, stream=True, catch_response=True, name="stream"
        ) as response:
            if response.status_code != 200:
                return  # counted as what it is
            last = ""
            for line in response.iter_lines(decode_unicode=True):
                last = line.removeprefix("data: ") or last
                if first_s is None and line.startswith("data: {") and _has_text(json.loads(last)):
                    first_s = time.perf_counter() - begun
            # Locust's own clock stops at the head of the answer.
            response.request_meta["response_time"] = (time.perf_counter() - begun) * 1000
            if last != "[DONE]":
                response.failure(f"the stream ended with {last[:200]!r}")
                return
            response.success()
        if first_s is not None:
            self.environment.events.request.fire(
                request_type="TTFT", name="stream, first token", response_time=first_s * 1000, response_length=0,
                exception=None, context={},
            )  # fmt: skip


def _has_text(chunk: dict[str, Any]) -> bool:
    return any(choice["delta"].get("content") for choice in chunk["choices"])
