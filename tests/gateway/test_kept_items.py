"""Which replica keeps what its answers have named."""

from __future__ import annotations

import pytest

from octavo.gateway import kept_items
from octavo.gateway.kept_items import CreatedIds
from octavo.gateway.replica import Replica
from octavo.gateway.upstream import Upstream


def replica(port: int) -> Replica:
    return Replica(str(port), Upstream(f"http://127.0.0.1:{port}", timeout_s=1), "m")


def test_the_oldest_ids_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_items, "_MAX_IDS", 10)
    ids, one = CreatedIds(), replica(1)
    for number in range(100):
        ids.add(str(number), "m", one)
    assert [number for number in range(100) if ids.find(str(number)) is not None] == [*range(90, 100)]
    assert ids.find("99") == ("m", one, None)


def test_an_id_in_an_answer_to_another_client_stays_with_who_made_it() -> None:
    ids, one, other = CreatedIds(), replica(1), replica(2)
    ids.add("resp_1", "a", one, "key_1")
    ids.add("resp_1", "b", other, "key_2")
    assert ids.find("resp_1") == ("a", one, "key_1")
    ids.add("resp_1", "a", other, "key_1")
    assert ids.find("resp_1") == ("a", other, "key_1"), "as a stream that another replica has ended"
