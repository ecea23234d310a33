"""Headers of requests: the same as Starlette's, found by name at once."""

from __future__ import annotations

from starlette.datastructures import Headers

from octavo.entrypoints.http.request_headers import RequestHeaders


def test_headers_are_found_in_any_case_and_the_first_of_several_counts() -> None:
    raw = [(b"x-one", b"first"), (b"x-other", "é".encode("latin-1")), (b"x-one", b"second")]
    headers, expected = RequestHeaders({"headers": raw}), Headers(raw=raw)
    assert headers == expected and list(headers) == list(expected)
    for name in ("X-One", "x-one", "X-OTHER", "absent"):
        assert headers.get(name) == expected.get(name) and (name in headers) == (name in expected)
    assert headers["X-One"] == "first" and headers.getlist("x-one") == ["first", "second"]
    assert headers.get("absent", "0") == "0"
