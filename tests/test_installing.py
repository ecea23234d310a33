"""A package index that is slow or away skips a test, and fails none."""

import sys

from tests.installing import why_not


def test_the_reason_is_what_the_command_says_or_that_it_takes_too_long() -> None:
    assert why_not([sys.executable, "-c", ""]) is None
    assert why_not([sys.executable, "-c", "import sys; sys.exit('no index')"]) == "no index\n"
    # Neither says anything nor ends, as an index that does not answer.
    assert (
        why_not([sys.executable, "-c", "import threading; threading.Event().wait()"], 0.1)
        == "it takes longer than 0.1 s"
    )
