"""What is known of Ray's cluster before Ray is asked. Tests with Ray are `test_ray`'s."""

from __future__ import annotations

import socket

import pytest

from octavo.distributed import ray_hosts


def test_a_cluster_that_takes_connections_and_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_hosts, "_ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(TimeoutError, match=f"{address} accepts connections and says nothing within 0.2 s"):
            ray_hosts._probe(address)
    with pytest.raises(ConnectionRefusedError):
        ray_hosts._probe(address)
