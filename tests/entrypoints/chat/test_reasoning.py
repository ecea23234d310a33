"""Where reasoning ends, in texts that are cut anywhere."""

from __future__ import annotations

import itertools
import random

import pytest

from octavo.entrypoints.chat.reasoning import STYLES, Reasoning, ReasoningSplitter, new_splitter


def split(style: str, prompt: str, text: str, cuts: list[int] | None = None) -> tuple[str, str]:
    reasoning = Reasoning.after(prompt, STYLES[style])
    if reasoning is None:
        return "", text
    splitter = ReasoningSplitter(reasoning)
    edges = [0, *(cuts or []), len(text)]
    parts = [splitter.add(text[a:b]) for a, b in itertools.pairwise(edges)] + [splitter.finish()]
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts)


CASES = [
    ("qwen3", "assistant\n", "<think>\nSo: 2 + 2.\n\nIs 4.\n</think>\n\nFour.\n", "So: 2 + 2.\n\nIs 4.", "Four.\n"),
    ("qwen3", "assistant\n", "Four, <think> or not.", "", "Four, <think> or not."),
    ("qwen3", "assistant\n", "<think>\nwithout an end </thin", "without an end </thin", ""),
    ("qwen3", "assistant\n<think>\n", "So.\n</think>\n\nFour.", "So.", "Four."),
    ("qwen3", "assistant\n<think>\n\n</think>\n\n", "Four. </think>", "", "Four. </think>"),
    ("qwen3", "assistant\n", "<thin", "", "<thin"),
    ("qwen3", "assistant\n", "", "", ""),
    ("qwen3", "assistant\n", "<think></think>Four", "", "Four"),
    ("deepseek_r1", "Assistant:", "So.\n</think>\n\nFour.", "So.", "Four."),
    ("deepseek_r1", "Assistant:", "<think>\nSo.</think>Four.", "So.", "Four."),
    ("deepseek_r1", "Assistant:", "no end\n\n", "no end", ""),
    ("mistral", "", "[THINK]So [1].[/THINK]Four.", "So [1].", "Four."),
    ("seed_oss", "", "<seed:think>So</seed:think>Four", "So", "Four"),
]


@pytest.mark.parametrize(("style", "prompt", "text", "reasoning", "content"), CASES)
def test_reasoning_and_content_are_told_apart(style: str, prompt: str, text: str, reasoning: str, content: str) -> None:
    assert split(style, prompt, text) == (reasoning, content)
    assert split(style, prompt, text, list(range(1, len(text)))) == (reasoning, content)
    rng = random.Random(1)
    for _ in range(30):
        cuts = sorted(rng.sample(range(len(text) + 1), min(len(text), rng.randint(1, 4))))
        assert split(style, prompt, text, cuts) == (reasoning, content)


HARMONY = (
    "<|channel|>analysis<|message|>Which {city}? <b>\n<|end|><|start|>assistant<|channel|>commentary<|message|>"
    "One moment.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    '{"city": "Paris"}<|call|><|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>'
    "<|start|>assistant<|channel|>final<|message|>Sun.<|return|>"
)


def test_channels_are_reasoning_content_and_calls() -> None:
    reasoning = Reasoning.after("<|start|>assistant", STYLES["openai_gptoss"])
    call = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}<|call|>"
    content = "One moment." + call.format("get_weather", '{"city": "Paris"}') + call.format("now", "{}") + "Sun."
    assert reasoning is not None
    for size in (1, 2, 3, 7, 10_000):
        splitter = new_splitter(reasoning)
        parts = [splitter.add(HARMONY[i : i + size]) for i in range(0, len(HARMONY), size)] + [splitter.finish()]
        assert "".join(part[0] for part in parts) == "Which {city}? <b>\n"
        assert "".join(part[1] for part in parts) == content


def test_an_answer_without_channels_is_content() -> None:
    reasoning = Reasoning.after("x", STYLES["openai_gptoss"])
    assert reasoning is not None
    splitter = new_splitter(reasoning)
    assert splitter.add("Four < ")[1] + splitter.add("five")[1] + splitter.finish()[1] == "Four < five"


def test_marks_of_the_content_are_left_out() -> None:
    reasoning = Reasoning.after("x", STYLES["hunyuan_a13b"])
    assert reasoning is not None
    text = "<think>\nHm.\n</think>\n<answer>\nFour <b>.\n</answer>"
    for size in (1, 3, 100):
        splitter = new_splitter(reasoning)
        parts = [splitter.add(text[i : i + size]) for i in range(0, len(text), size)] + [splitter.finish()]
        assert ("".join(p[0] for p in parts), "".join(p[1] for p in parts)) == ("Hm.", "Four <b>.")
