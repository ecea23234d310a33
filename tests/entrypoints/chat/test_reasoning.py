"""Where reasoning ends, in texts that are cut anywhere."""

# ruff: noqa: E501 - answers are easier to read in one line

from __future__ import annotations

import itertools
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.entrypoints.chat.answer_reader import AnswerFormat, AnswerReader, CallDelta, ReasoningDelta, TextDelta
from octavo.entrypoints.chat.reasoning import FUNCTIONARY, STYLES, Reasoning, held_back, new_splitter
from octavo.entrypoints.chat.tools.format_parser import FormatParser, trigger_marks
from octavo.entrypoints.chat.tools.tool_formats import FORMATS


def split(style: str, prompt: str, text: str, cuts: list[int] | None = None) -> tuple[str, str]:
    reasoning = Reasoning.after(prompt, STYLES[style])
    if reasoning is None:
        return "", text
    splitter = new_splitter(reasoning)
    edges = [0, *(cuts or []), len(text)]
    parts = [splitter.add(text[a:b]) for a, b in itertools.pairwise(edges)] + [splitter.finish()]
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts)


@pytest.mark.parametrize(
    ("style", "begun", "is_open"),
    [
        ("qwen3", "<think>\nSo: 2", True),
        ("qwen3", "<think>\nSo.\n</think>\n\nFo", False),
        ("qwen3", "Fo", False),
        ("deepseek_r1", "<think>\nSo", True),
        ("deepseek_r1", "So.</think>Fo", False),
        ("deepseek_r1", "", True),
        ("qwen3", "In its output, the <think> tag", False),
    ],
)
def test_an_answer_may_continue_the_reasoning_or_the_content_of_a_message(
    style: str, begun: str, is_open: bool
) -> None:
    question = "What does <think> do?<|im_end|>\n<|im_start|>assistant\n"
    reasoning = Reasoning.after(question + begun, STYLES[style], begun)
    assert reasoning is not None and reasoning.is_open is is_open
    splitter = new_splitter(reasoning)
    parts = splitter.add("x</think>\n\ny"), splitter.finish()
    assert "".join(part[0] for part in parts) == ("x" if is_open else "")


@pytest.mark.parametrize(("begun", "shown"), [("<think>\nSo:", "\n\n1. x"), ("<think>\n", "1. x"), ("<think>", "1. x")])
def test_line_breaks_within_a_reasoning_that_goes_on_are_part_of_it(begun: str, shown: str) -> None:
    reasoning = Reasoning.after(f"assistant\n{begun}", STYLES["qwen3"], begun)
    assert reasoning is not None
    answer = "\n\n1. x\n</think>\n\nFour."
    for pieces in ([answer], list(answer)):
        splitter = new_splitter(reasoning)
        parts = [splitter.add(piece) for piece in pieces] + [splitter.finish()]
        assert ("".join(part[0] for part in parts), "".join(part[1] for part in parts)) == (shown, "Four.")


def test_a_mark_that_stays_in_the_content_is_not_written_twice() -> None:
    reasoning = Reasoning.after("assistant\n<think>Let me", STYLES["minimax_m2_append_think"], "<think>Let me")
    assert reasoning is not None and new_splitter(reasoning).add(" see") == ("", " see")


SOLAR = "<|begin|>assistant"
K3_END, K3_LAST = "<|close|>think<|sep|>", "<|close|>message<|sep|>"
K3_ANSWER = "<|open|>response<|sep|>Four.<|close|>response<|sep|>"
K3_CALL = '<|open|>tools<|sep|><|open|>call tool="now" index="1"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'
MODEL, END, INVOKE = "<|message_model|>", "<|end_message|>", "<|content_invoke_tool_json|>"
MUSE = "<|start|>assistant"
ATEM = '<atem:function_calls>\n<atem:invoke name="f">\n</atem:invoke>\n</atem:function_calls>'
CASES = [
    ("qwen3", "assistant\n", "<think>\nSo: 2 + 2.\n\nIs 4.\n</think>\n\nFour.\n", "So: 2 + 2.\n\nIs 4.", "Four.\n"),
    ("qwen3", "assistant\n", "Four, <think> or not.", "", "Four, <think> or not."),
    ("qwen3", "assistant\n", "<think>\nwithout an end </thin", "without an end </thin", ""),
    ("qwen3", "assistant\n<think>\n", "So.\n</think>\n\nFour.", "So.", "Four."),
    ("qwen3", "assistant\n<think>\n\n</think>\n\n", "Four. </think>", "", "Four. </think>"),
    ("qwen3", "assistant\n", "<thin", "", "<thin"),
    ("qwen3", "assistant\n", "", "", ""),
    ("qwen3", "assistant\n", "<think></think>Four", "", "Four"),
    ("cohere", "assistant", "<|START_RESPONSE|>Four.<|END_RESPONSE|>", "", "Four."),
    ("hunyuan_a13b", "assistant", "\n<answer>\nFour.\n</answer>", "", "Four."),
    ("hunyuan_a13b", "assistant", "<ans", "", "<ans"),
    # Thinking is off: the prompt has ended the reasoning.
    ("cohere", "<|START_THINKING|><|END_THINKING|>", "<|START_RESPONSE|>Four.<|END_RESPONSE|>", "", "Four."),
    (
        "cohere",
        "<|START_THINKING|><|END_THINKING|>",
        "<|START_ACTION|>[]<|END_ACTION|>",
        "",
        "<|START_ACTION|>[]<|END_ACTION|>",
    ),
    ("hunyuan_a13b", "<think>\n\n</think>\n", "\n<answer>\nFour <b>.\n</answer>", "", "Four <b>."),
    ("hunyuan_a13b", "<think>\n\n</think>\n", "\nFour.\n", "", "\nFour.\n"),
    ("hunyuan_a13b", "<think>\n\n</think>\n", "<think>Four.</think>", "", "<think>Four.</think>"),
    ("ernie45", "<think>\n\n</think>\n\n", "<response>\nFour.\n</response>", "", "Four."),
    ("ernie45", "<think>\n\n</think>\n\n", "<resp", "", "<resp"),
    ("hunyuan_a13b", "assistant", "<a>Four.</answer>", "", "<a>Four.</answer>"),
    ("deepseek_r1", "Assistant:", "So.\n</think>\n\nFour.", "So.", "Four."),
    ("deepseek_r1", "Assistant:", "<think>\nSo.</think>Four.", "So.", "Four."),
    ("deepseek_r1", "Assistant:", "no end\n\n", "no end", ""),
    ("mistral", "", "[THINK]So [1].[/THINK]Four.", "So [1].", "Four."),
    ("seed_oss", "", "<seed:think>So</seed:think>Four", "So", "Four"),
    ("minimax_m3", "ai\n<mm:think>", "So.</mm:think>Four.", "So.", "Four."),
    ("solar_open2", "<|think:start|>", "So.<|think:end|>Four.", "So.", "Four."),
    ("solar_open2", "<|think:start|><|think:end|>", "Four.", "", "Four."),
    ("solar_open", SOLAR, f"<|think|>So.<|end|>{SOLAR}<|content|>Four.<|end|>", "So.", "Four."),
    ("solar_open", f"{SOLAR}<|think|><|end|>{SOLAR}", "<|content|>Four.", "", "Four."),
    ("solar_open", SOLAR, f"<|think|>So.<|end|>{SOLAR}<|tool_calls|>c<|calls|>", "So.", "<|tool_calls|>c<|calls|>"),
    # Reasoning that stays in the content, with both marks.
    ("minimax_m2_append_think", "ai\n<think>\n", "So.</think>Four.", "", "<think>So.</think>Four."),
    ("minimax_m2_append_think", "ai\n", "<think>So.</think>Four.", "", "<think>So.</think>Four."),
    # Blocks, of which calls stay in the content with their marks.
    ("kimi_k3", "<|open|>think<|sep|>", f"So.{K3_END}{K3_ANSWER}{K3_CALL}{K3_LAST}", "So.", f"Four.{K3_CALL}"),
    ("kimi_k3", "assistant", f"<|open|>think<|sep|>So.{K3_END}{K3_ANSWER}{K3_LAST}", "So.", "Four."),
    ("kimi_k3", f"<|open|>think<|sep|>{K3_END}", f"{K3_ANSWER}{K3_LAST}", "", "Four."),
    ("kimi_k3", f"{K3_END}<|open|>response<|sep|>", f"Four.<|close|>response<|sep|>{K3_LAST}", "", "Four."),
    ("kimi_k3", "<|open|>think<|sep|>", f"So.{K3_CALL}{K3_LAST}", "So.", K3_CALL),
    ("kimi_k3", "<|open|>think<|sep|>", "So.<|close|>thi", "So.<|close|>thi", ""),
    (
        "inkling",
        MODEL,
        f"<|content_thinking|>So.{END}{MODEL}<|content_text|>Four.{END}<|content_model_end_sampling|>",
        "So.",
        "Four.",
    ),
    ("inkling", MODEL, f"<|content_text|>Four.{END}{MODEL}<|content_thinking|>So.{END}", "So.", "Four."),
    (
        "inkling",
        MODEL,
        f"now{INVOKE}{{}}{END}{MODEL}now{INVOKE}{{}}{END}",
        "",
        f"{INVOKE}{{}}{END}{MODEL}{INVOKE}{{}}{END}",
    ),
    ("inkling", f"{MODEL}<|content_text|>", f"Four.{END}", "", "Four."),
    ("muse_glimmer", MUSE, f" to=self<|message|>So.<|eom|>{MUSE} to=user<|message|>Four.<|eot|>", "So.", "Four."),
    ("muse_glimmer", MUSE, f" to=f<|message|>{ATEM}<|eom|>{MUSE} to=f<|message|>{ATEM}<|eot|>", "", ATEM + ATEM),
    ("muse_glimmer", MUSE, f"to=self<|message|>So.<|eom|>{MUSE} to=f<|message|>{ATEM}<|eot|>", "So.", ATEM),
    ("muse_glimmer", MUSE, " to=user<|message|>a to=user b<|eom|>", "", "a to=user b"),
    ("muse_glimmer", MUSE, f" to=self<|message|>So.\nto=f<|message|>{ATEM}", "So.\n", ATEM),
    ("muse_glimmer", f"{MUSE} to=self<|message|>", f"into=x<|me> to=f<|message|>{ATEM}<|eot|>", "into=x<|me> ", ATEM),
    ("muse_glimmer", MUSE, "Four.", "", "Four."),
    ("inkling", MODEL, "Four.", "", "Four."),
]


@pytest.mark.parametrize(("style", "prompt", "text", "reasoning", "content"), CASES)
def test_reasoning_and_content_are_told_apart(style: str, prompt: str, text: str, reasoning: str, content: str) -> None:
    assert split(style, prompt, text) == (reasoning, content)
    assert split(style, prompt, text, list(range(1, len(text)))) == (reasoning, content)
    rng = random.Random(1)
    for _ in range(30):
        cuts = sorted(rng.sample(range(len(text) + 1), min(len(text), rng.randint(1, 4))))
        assert split(style, prompt, text, cuts) == (reasoning, content)


@pytest.mark.parametrize(
    ("prompt", "text", "content"),
    [
        (">>>", "all\nFour > 3.", "Four > 3."),
        (">>>", "all\n>>> print({})\n>>>> 1 >>", ">>> print({})\n>>>> 1 >>"),
        (">>>", 'f-1\n{"a": ">>>all"}', '>>>f-1\n{"a": ">>>all"}'),
        (">>>", 'all\nOne.>>>f\n{}>>>g\n {}>>>all\nTwo.', 'One.>>>f\n{}>>>g\n {}Two.'),
        (">>>", 'f\n{}>>>all', '>>>f\n{}>>>all'),
        (">>>", "Four.", "Four."),
        (">>>", "all", "all"),
        (">>>", "all right\n", "all right\n"),
        (">>>", f"all{' ' * 32}\nhi", "hi"),
        (">>>", f"all{' ' * 33}\nhi", f"all{' ' * 33}\nhi"),
        (">>>", f"f{' ' * 33}\n{{}}", f"f{' ' * 33}\n{{}}"),
        (">>>", "", ""),
        (">>>", ">>>f\n{", ">>>f\n{"),
        ("", ">>>all\nFour", "Four"),
        ("", "f\n{}", "f\n{}"),
    ],
)  # fmt: skip
def test_recipients_of_functionary_are_told_from_content(prompt: str, text: str, content: str) -> None:
    reasoning = Reasoning.after(f"assistant\n\n{prompt}", FUNCTIONARY)
    assert reasoning is not None
    for begin in range(len(text) + 1):
        for end in range(begin, len(text) + 1):
            splitter = new_splitter(reasoning)
            parts = [splitter.add(part) for part in (text[:begin], text[begin:end], text[end:])] + [splitter.finish()]
            assert ("".join(part[0] for part in parts), "".join(part[1] for part in parts)) == ("", content)


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


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (" to=functions.now<|channel|>commentary json<|message|>{}<|call|>", "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}<|call|>"),
        ("to=functions.now <|constrain|>json<|message|>{}<|call|>", "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}<|call|>"),
        (" to=assistant<|channel|>analysis to=functions.now<|message|>{}<|call|>", "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}<|call|>"),
        (" to be or not", " to be or not"),
        ("to", "to"),
        ("to=you, with love, and more than fits into a header of any message that a model would write <b>", "to=you, with love, and more than fits into a header of any message that a model would write <b>"),
        ("tomorrow <|end|><|start|>assistant to=functions.now<|channel|>commentary<|message|>{}", "tomorrow <|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"),
    ],
)  # fmt: skip
def test_a_recipient_in_the_role_is_read_however_the_text_is_cut(text: str, content: str) -> None:
    reasoning = Reasoning.after("<|start|>assistant", STYLES["openai_gptoss"])
    assert reasoning is not None
    for begin in range(len(text) + 1):
        for end in {begin, begin + 1, begin + 3, begin + 9, len(text)}:
            splitter = new_splitter(reasoning)
            parts = [splitter.add(part) for part in (text[:begin], text[begin:end], text[end:])] + [splitter.finish()]
            assert ("".join(part[0] for part in parts), "".join(part[1] for part in parts)) == ("", content)


@pytest.mark.parametrize(
    ("style", "prompt", "text"),
    [
        ("muse_glimmer", MUSE, " to=" * 150),
        ("inkling", MODEL, f"{'now ' * 150}{INVOKE}{{}}{END}"),
        ("openai_gptoss", "<|start|>assistant", f"<|channel|>{'analysis ' * 60}<|message|>"),
        ("openai_gptoss", "<|start|>assistant", "<|channel|>" * 47 + "x" * 99),
        ("openai_gptoss", "<|start|>assistant", " " * 600),
    ],
)
def test_a_text_that_is_too_long_for_a_header_is_content(style: str, prompt: str, text: str) -> None:
    content = re.sub(r"<\|(?:channel|message)\|>", "", text)
    for size in (1, 3, 7, len(text)):
        cuts = list(range(size, len(text), size))
        assert split(style, prompt, text, cuts) == ("", content)
    reasoning = Reasoning.after(prompt, STYLES[style])
    assert reasoning is not None
    splitter = new_splitter(reasoning)
    given = sum(len(splitter.add(piece)[1]) for piece in text)
    assert given >= len(content) - 50, "it is not held until the answer ends"


PYTHON_CALL = "<|tool_call_start|>[now()]<|tool_call_end|>"
ENDED = [
    ("hermes", "Plan.\n\n<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>", "Plan.", "", 1),
    ("hermes", "<tool_call>{\"name\": \"now\", \"arguments\": {}}</tool_call>", "", "", 1),
    ("hermes", "I write <tool_call> and\n<tool_call>{\"name\": \"now\", \"arguments\": {}}</tool_call> Well.", "I write <tool_call> and", " Well.", 1),
    ("hermes", "I could use <tool_call> here.\n</think>\nNo.", "I could use <tool_call> here.", "No.", 0),
    ("hermes", "I could use <tool_call>", "I could use <tool_call>", "", 0),
    ("hermes", "I could use \n<tool_call>{\"name\": \"now\", \"argu", "I could use \n<tool_call>{\"name\": \"now\", \"argu", "", 0),
    ("hermes", "Plan.\n</think>\n\n<tool_call>{\"name\": \"now\", \"arguments\": {}}</tool_call>", "Plan.", "", 1),
    ("qwen3_coder", "Plan.\n<tool_call>\n<function=now>\n</function>\n</tool_call>", "Plan.", "", 1),
    ("qwen3_coder", "Plan.\n<function=now>\n</function>\n</tool_call>", "Plan.", "", 1),
    ("deepseek_v31", "Plan.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "Plan.", "", 1),
    ("kimi_k2", "Plan.<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>", "Plan.", "", 1),
    ("minimax_m2", 'Plan.\n<minimax:tool_call>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>', "Plan.", "", 1),
    ("glm45", "Plan.\n<tool_call>now\n</tool_call>", "Plan.", "", 1),
    ("lfm2", f"Plan. {PYTHON_CALL}", "Plan. ", "", 1),
]  # fmt: skip


@pytest.mark.parametrize(("format", "text", "thought", "content", "num_calls"), ENDED)
def test_a_call_ends_reasoning_that_was_not_ended(
    format: str, text: str, thought: str, content: str, num_calls: int
) -> None:
    reasoning = Reasoning.after("<|im_start|>assistant\n<think>\n", STYLES["qwen3"])
    form = FORMATS[format]
    answer = AnswerFormat(reasoning, True, lambda: FormatParser(form, {"now": {}}), call_marks=trigger_marks(form))
    rng = random.Random(2)
    for size in (1, 2, 5, 10_000, 0, 0, 0):
        cuts = list(range(size, len(text), size)) if size else sorted(rng.sample(range(len(text)), 4))
        reader = AnswerReader(answer)
        edges = [0, *cuts, len(text)]
        deltas = [d for a, b in itertools.pairwise(edges) for d in reader.add(text[a:b], is_end=b == len(text))]
        assert "".join(d.text for d in deltas if isinstance(d, ReasoningDelta)) == thought
        assert "".join(d.text for d in deltas if isinstance(d, TextDelta)) == content
        assert [d.name for d in deltas if isinstance(d, CallDelta) and d.name] == ["now"] * num_calls


@settings(deadline=None, derandomize=True)
@given(text=st.text(st.sampled_from("ab<"), max_size=8), mark=st.text(st.sampled_from("ab<"), max_size=5))
def test_what_may_begin_a_mark_is_held_back(text: str, mark: str) -> None:
    lengths = [n for n in range(1, len(mark)) if text.endswith(mark[:n])]
    assert held_back(text, mark) == max(lengths, default=0)
