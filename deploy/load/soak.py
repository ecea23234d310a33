"""--users for --run-time (an hour), with a minute's pause in every ten, in which memory and blocks must come back:
locust -f deploy/load/locustfile.py,deploy/load/soak.py …"""

from __future__ import annotations

from locust import LoadTestShape

PERIOD_S, PAUSE_S = 600, 60


class Soak(LoadTestShape):
    """Of users over time. A pause has one user, since Locust ends with none."""

    use_common_options = True

    def tick(self) -> tuple[int, float] | None:
        options = self.runner.environment.parsed_options
        if self.get_run_time() >= (options.run_time or 3600):
            return None
        pauses = self.get_run_time() % PERIOD_S >= PERIOD_S - PAUSE_S
        return 1 if pauses else options.users, options.spawn_rate
