"""Stop strings are found wherever they lie."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine.stop_strings import StopStrings

stop_lists = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4, unique=True)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(stop=stop_lists, pieces=st.lists(st.text("abc", max_size=4), max_size=12), include=st.booleans())
def test_the_stop_string_that_is_complete_first_ends_the_text(
    stop: list[str], pieces: list[str], include: bool
) -> None:
    watch = StopStrings(stop, include)
    text, shown = "", ""
    found = None
    for piece in pieces:
        text += piece
        found = watch.find(text, len(piece))
        if found is not None:
            text = text[: found[1]]
            break
        num_shown = len(text) - watch.num_held_back(text)
        assert num_shown >= len(shown), "what was shown is never taken back"
        shown = text[:num_shown]
    whole = "".join(pieces)
    ends = [(whole.find(s) + len(s), -len(s), s) for s in stop if s in whole]
    if not ends:
        assert found is None
        assert text == whole
        return
    end, _, first = min(ends)
    assert found is not None
    assert found[0] == first, "of several that end together the longest counts"
    assert text == whole[: end if include else end - len(first)]
    assert text.startswith(shown), "nothing is shown that the stop string cuts off"


@settings(max_examples=100, derandomize=True, deadline=None)
@given(stop=stop_lists, text=st.text("abc", max_size=12))
def test_exactly_what_may_still_begin_a_stop_string_is_held_back(stop: list[str], text: str) -> None:
    possible = [n for n in range(1, len(text) + 1) for s in stop if len(s) > n and s.startswith(text[len(text) - n :])]
    assert StopStrings(stop, False).num_held_back(text) == max(possible, default=0)
    assert StopStrings(stop, True).num_held_back(text) == 0


def test_a_stop_string_in_old_text_is_not_found_again() -> None:
    """It was passed over because too few tokens were out; a longer stop string beside it does not widen its search."""
    watch = StopStrings(["ab", "a very long stop string"], False)
    assert watch.find("ab and more", 3) is None
    assert watch.find("ab and mab", 1) == ("ab", 8)
