"""When a core that dies is started again."""

from __future__ import annotations

from octavo.engine.restart_policy import QUICK_S, RestartPolicy


def test_quick_deaths_wait_longer_each_time_and_end_in_giving_up() -> None:
    restarts = RestartPolicy(4)
    restarts.record_ready(0.0)
    assert [restarts.next_delay(1.0) for _ in range(5)] == [0.0, 1.0, 2.0, 4.0, None]


def test_a_core_that_computed_tokens_is_started_again_at_once_but_no_more_often() -> None:
    restarts = RestartPolicy(3)
    delays = []
    for has_served in (True, False, True, True):
        restarts.record_ready(0.0)
        if has_served:
            restarts.record_outputs()
        delays.append(restarts.next_delay(1.0))
    assert delays == [0.0, 1.0, 0.0, None]


def test_a_core_that_served_for_long_clears_the_account() -> None:
    restarts = RestartPolicy(1)
    for now in (0.0, 1000.0, 2000.0):
        restarts.record_ready(now)
        assert restarts.next_delay(now + QUICK_S + 1) == 0.0
    restarts.record_ready(3000.0)
    assert restarts.next_delay(3001.0) is None


def test_without_restarts_the_first_death_is_the_end() -> None:
    restarts = RestartPolicy(0)
    restarts.record_ready(0.0)
    assert restarts.next_delay(1000.0) is None
