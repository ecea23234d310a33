"""Notes about prompts: read in parts, and the oldest forgotten."""

from __future__ import annotations

import pytest

from octavo.engine import prompt_notes
from octavo.engine.prompt_notes import PromptNotes


@pytest.mark.parametrize("count", [0, 3, 10, 39, 40, 65])
def test_a_reader_gets_each_prompt_once_and_the_oldest_are_forgotten(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_notes, "_MAX_PROMPTS", 20)
    monkeypatch.setattr(prompt_notes, "_MAX_READ", 7)
    notes, every = PromptNotes(), [str(number) for number in range(count)]
    for one in every:
        notes.add(one)
    found: list[str] = []
    part = notes.read("", 0)
    while True:
        found += part["prompts"]
        if not part["has_more"]:
            break
        part = notes.read(part["id"], part["next"])
    assert found == every[-len(found) :] if found else not every
    assert min(count, 20) <= len(found) < 40
    notes.add("next")
    assert notes.read(part["id"], part["next"])["prompts"] == ["next"]


@pytest.mark.parametrize("names", ["", '"' * 1024, "é", "a\n", "a" * 1025])
def test_what_can_be_no_names_is_not_noted(names: str) -> None:
    notes = PromptNotes()
    notes.add(names)
    assert notes.read("", 0)["prompts"] == []
