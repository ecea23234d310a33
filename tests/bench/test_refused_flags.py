"""Benchmarks refuse flags that would change nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from benchmarks import many_models, routing


@pytest.mark.parametrize(
    ("main", "flags", "reason"),
    [
        (routing.main, "--gateways 2", "need --router gateway"),
        (routing.main, "--without-notes", "need --router gateway"),
        (routing.main, "--router round-robin --exact", "need --router gateway"),
        (routing.main, "--adapters 8 --router gateway --several-gateways", "--adapters takes"),
        (routing.main, "--adapters 8 --replica-restart 30", "--adapters takes"),
        (many_models.main, "cold --evict", "needs --model FILE"),
        (many_models.main, f"zipf --evict --model {__file__}", "is for cold"),
    ],
)
def test_a_flag_without_effect_is_refused(
    main: Callable[[], None],
    flags: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark", *flags.split()])
    with pytest.raises(SystemExit):
        main()
    assert reason in capsys.readouterr().err
