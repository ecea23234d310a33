"""To --users in ten equal steps over --run-time: locust -f deploy/load/locustfile.py,deploy/load/ramp.py …

The step at which the time to first token leaves the others behind is what the server carries.
"""

from __future__ import annotations

from locust import LoadTestShape

NUM_STEPS = 10


class Ramp(LoadTestShape):
    """Of users over time."""

    use_common_options = True

    def tick(self) -> tuple[int, float] | None:
        options = self.runner.environment.parsed_options
        run_time_s = options.run_time or 600
        if self.get_run_time() >= run_time_s:
            return None
        step = int(self.get_run_time() / run_time_s * NUM_STEPS) + 1
        return max(1, options.users * step // NUM_STEPS), options.spawn_rate
