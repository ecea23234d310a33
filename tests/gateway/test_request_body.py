"""What the gateway reads of a body, and the one thing that it changes."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import UploadFile
from starlette.requests import Request

from octavo.errors import RequestError
from octavo.gateway import request_body, upstream
from octavo.gateway.request_body import RequestBody, read_body
from tests.gateway.fakes import answer_plainly, fake_servers, gateway

JSON = "application/json"
_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda below: (
        st.lists(below, max_size=3) | st.dictionaries(st.sampled_from(["model", "a", 'q"']), below, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=3), _values, max_size=4), st.text(max_size=5), st.text(max_size=5))
def test_nothing_but_the_models_name_changes(fields: dict[str, object], name: str, other: str) -> None:
    body = {**fields, "model": name}
    data = json.dumps(body, indent=1).encode()
    read = read_body(data, JSON)
    assert read.model == name
    assert json.loads(b"".join(read.parts(other))) == {**body, "model": other}
    assert read.parts(name) == [data]


def test_the_outermost_name_is_the_one_that_changes() -> None:
    data = rb'{"messages": [{"model": "m"}, "{\"model\": \"m\"}"], "model": "m", "x": {"model": "m"}}'
    assert b"".join(read_body(data, JSON).parts("n")) == data.replace(
        b'], "model": "m"', b'], "model":"n"'.replace(b":", b": ")
    )


def test_a_name_that_cannot_be_found_is_refused_and_not_searched_for_ever() -> None:
    data = b'{"x": [' + b'{"model": "m"},' * 1000 + b'1], "model": "m"}'
    with pytest.raises(RequestError, match="put the key"):
        read_body(data, JSON).parts("n")


@pytest.mark.parametrize(
    "data",
    [b"[]", b"1", b'"model"', b"{", b'{"model": ["a"]}', b'{"model": "\xff"}', b"\xff", b'{"x":' + b"[" * 99_999],
)
def test_what_is_no_object_is_refused(data: bytes) -> None:
    with pytest.raises(RequestError):
        read_body(data, JSON)


def test_a_form_is_read_by_its_own_boundary() -> None:
    def part(name: str, value: bytes) -> bytes:
        return f'--b+1\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n'.encode() + value + b"\r\n"

    data = part("file", b'--b\r\nname="model"') + part("model", b"m\xc3\xa9") + part("stream", b"true") + b"--b+1--\r\n"
    read = read_body(data, 'multipart/form-data; boundary="b+1"')
    assert (read.model, read.streams) == ("mé", True)
    assert b"".join(read.parts("longer")) == data.replace(b"m\xc3\xa9", b"longer")
    assert read_body(part("file", b"x") + b"--b+1--", "Multipart/Form-Data; charset=x; BOUNDARY=b+1").model is None
    with pytest.raises(RequestError, match="boundary"):
        read_body(data, "multipart/form-data")


FORM = "multipart/form-data; boundary=b"


def part_of_form(head: str, value: str = "x") -> bytes:
    return f"--b\r\n{head}\r\n\r\n{value}\r\n".encode()


MODEL = 'Content-Disposition: form-data; name="model"'
OTHER = 'Content-Disposition: form-data; name="file"; filename="a \\"b.wav"\r\nContent-Type: audio/wav'
END = b"--b--\r\n"


def test_parts_of_forms_are_read_as_clients_write_them() -> None:
    for head in (MODEL, "content-disposition: form-data; name=model", f"Content-Type: text/plain\r\n{MODEL}"):
        found = read_body(part_of_form(OTHER) * 63 + part_of_form(head, "m") + END, FORM.replace("b", "B", 1))
        assert found.model == "m"
    assert read_body(b"--b--", FORM).model is None
    web = part_of_form(MODEL, "m") + END
    found = read_body(web.replace(b"--b", b"------WebKitFormBoundary7MA4"), FORM[:-1] + "----WebKitFormBoundary7MA4")
    assert found.model == "m"


@pytest.mark.parametrize(
    "data",
    [
        part_of_form(OTHER) * 64 + part_of_form(MODEL) + END,
        part_of_form(MODEL) + part_of_form(MODEL, "y") + END,
        part_of_form(MODEL.replace(": form-data;", ":form-data ;")) + END,
        part_of_form(MODEL.replace("name=", "name = ")) + END,
        part_of_form(MODEL.replace("model", "mod\\el")) + END,
        part_of_form(MODEL.replace('name="model"', "name*=utf-8''model")) + END,
        part_of_form(MODEL.replace("; name", ";\r\n name")) + END,
        part_of_form(MODEL + "\r\n ; filename=x") + END,
        part_of_form(MODEL.replace("model", "x") + "; filenames=1; \tNAME=model") + END,
        part_of_form(OTHER.replace("\r\n", '; name*0="mo"\r\n')) + END,
        part_of_form(MODEL.replace("model", "x") + "\r\n" + MODEL) + END,
        part_of_form("X-" + MODEL) + END,
        part_of_form(MODEL)[:-2] + END,
        part_of_form(MODEL) + b"--bb",
        b"preamble " + part_of_form(MODEL) + END,
    ],
)  # fmt: skip
def test_a_form_in_which_servers_could_find_another_model_is_refused(data: bytes) -> None:
    with pytest.raises(RequestError, match="several ways"):
        read_body(data, FORM)


@pytest.mark.parametrize("kind", [
    "", "; boundary=c; boundary=b", "; boundary=b, multipart/form-data; boundary=c", "; boundary=b; BOUNDARY*=c",
    '; x="; boundary=b"', "; boundary=b, application/json",
])  # fmt: skip
def test_a_form_names_one_boundary(kind: str) -> None:
    with pytest.raises(RequestError, match="boundary once"):
        read_body(part_of_form(MODEL) + END, "multipart/form-data" + kind)


@given(st.lists(st.sampled_from([
    b"--b", b"\r\n", b"\r\n\r\n", b"\n", b" ", b"--", b";", b"x", b'"', b"=", b"\r\n--b", b"\r\n--b--\r\n",
    MODEL.encode(), OTHER.encode(), b'name="model"', b"content-disposition: form-data; name=model",
    part_of_form(MODEL, "m"), part_of_form(OTHER), b"filename=",
    part_of_form(MODEL.replace("model", "x") + "; filenames=1; name=model"),
]), max_size=12), st.booleans())  # fmt: skip
def test_a_form_that_is_read_has_the_model_that_a_server_finds(pieces: list[bytes], ends: bool) -> None:
    async def receive() -> Any:
        return {"type": "http.request", "body": data, "more_body": False}

    async def found() -> Any:
        scope = {"type": "http", "method": "POST", "headers": [(b"content-type", FORM.encode())]}
        form = await Request(scope, receive).form()
        model = form.get("model")
        return await model.read() if isinstance(model, UploadFile) else model

    data = b"".join(pieces) + (END if ends else b"")
    try:
        read = read_body(data, FORM)
    except RequestError:
        return
    model = asyncio.run(found())
    assert read.model == (model.decode() if isinstance(model, bytes) else model)


def test_fields_too_long_to_decide_about_a_replica_are_not_read() -> None:
    long = [[1]] * 2000
    names = ("stream", "stream_options", "background", "conversation", "previous_response_id", "session_id", "resume")
    read = read_body(json.dumps(dict.fromkeys(names, long)).encode(), JSON)
    assert (read.streams, read.wants_usage, read.is_background, read.refers_to, read.session_id) == (False,) * 3 + (
        None,
    ) * 2
    assert read.is_resumed
    assert not read_body(b'{"resume": null}', JSON).is_resumed
    with pytest.raises(RequestError, match="4096"):
        read_body(json.dumps({"model": "m" * 5000}).encode(), JSON)


def test_a_conversation_of_too_many_values_is_split_like_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    talk = [{"role": "user"}] * 200
    assert len(_hashes(messages=talk)) == 200
    monkeypatch.setattr(request_body, "_MAX_COMMAS", 198)
    assert len(_hashes(messages=talk)) == -(-len(json.dumps(talk)) // 1024)


def _hashes(**fields: object) -> list[bytes]:
    return list(read_body(json.dumps(fields).encode(), JSON).prefixes[0])


def test_a_longer_conversation_has_the_hashes_of_a_shorter_one() -> None:
    talk = [{"role": "user", "content": str(number)} for number in range(4)]
    for key in ("messages", "input"):
        assert _hashes(**{key: talk})[:2] == _hashes(**{key: talk[:2]})
        assert len(set(_hashes(**{key: talk}))) == 4
    assert _hashes(messages=talk, system="other")[0] != _hashes(messages=talk)[0]
    assert _hashes(messages=talk, tools=[{}])[0] != _hashes(messages=talk)[0]
    text = "x" * 5000
    assert _hashes(prompt=text + "more")[:4] == _hashes(prompt=text)[:4]
    assert _hashes(prompt=text)[0] != _hashes(prompt="y" * 5000)[0]
    assert _hashes() == [] and read_body(b"", JSON).prefixes == ({}, None)


def test_a_prefix_has_the_bytes_of_what_comes_before_it_too() -> None:
    talk = b'{"system": "abc", "messages": [{"role": "user"}, 12]}'
    assert list(read_body(talk, JSON).prefixes[0].values()) == [5 + 16, 5 + 16 + 2]


def test_turns_of_a_conversation_share_a_hash_up_to_the_users_first_message() -> None:
    def shared(**fields: object) -> bytes | None:
        return read_body(json.dumps(fields).encode(), JSON).prefixes[1]

    system = {"role": "system", "content": 'The "user" is kind.'}
    for before in ([], [system]):
        turns = [*before, {"role": "user", "content": "a"}]
        later = [*turns, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
        other = [*before, {"role": "user", "content": "x"}]
        assert shared(messages=turns) == shared(messages=later) != shared(messages=other)
    assert shared(prompt="x" * 2000 + "y") == shared(prompt="x" * 2000 + "z")
    assert shared() is None


_BASE64 = "/9j+" * 25_000


@pytest.mark.parametrize(
    "medium",
    [
        {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{_BASE64}"}},
        {"type": "input_image", "image_url": f"data:image/jpeg;base64,{_BASE64}"},
        {"type": "image", "source": {"type": "base64", "media_type": "image/jpeg", "data": _BASE64}},
        {"type": "input_audio", "input_audio": {"data": _BASE64, "format": "wav"}},
    ],
)
def test_text_beside_media_counts_as_text(medium: dict[str, object]) -> None:
    def num_bytes(*parts: dict[str, object]) -> int:
        body = json.dumps({"messages": [{"role": "user", "content": parts}]}).encode().replace(b"/", rb"\/")
        return max(read_body(body, JSON).prefixes[0].values())

    text = {"type": "text", "text": 'It says "data:x;base64,' + "some words " * 5000 + '"'}
    document = {"type": "document", "source": {"type": "text", "data": "some words " * 5000}}
    beside = num_bytes(text, document)
    assert beside > 110_000
    for number in (1, 2):
        assert 4096 * number < num_bytes(*[medium] * number, text, document) - beside < 4096 * number + 500


@pytest.mark.parametrize(("written", "is_on"), [("true", 1), ("1", 1), ('"Yes"', 1), ("[]", 0), ("0", 0), ('"no"', 0)])
def test_flags_are_read_as_servers_do_that_take_more_than_booleans(written: str, is_on: int) -> None:
    read = read_body(b'{"stream": %b, "background": %b}' % (written.encode(), written.encode()), JSON)
    assert read.streams == read.is_background == bool(is_on)


@pytest.mark.parametrize("piece_bytes", [1, 7, 100])
def test_work_in_pieces_finds_the_same(monkeypatch: pytest.MonkeyPatch, piece_bytes: int) -> None:
    document = {"type": "document", "source": {"type": "text", "data": "some words " * 99}}
    image = {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{'/9j+' * 2000}"}}
    talk = [{"role": "system", "content": "be kind"}, {"role": "user", "content": [document, image]}]
    for body in ({"messages": talk}, {"prompt": "x " * 3000}, {"prompt": [1, 2] * 900}):
        data = json.dumps({**body, "tools": [{"model": "m"}], "model": "m", "n": 1}).encode()
        whole = read_body(data, JSON)
        expected = whole.prefixes, b"".join(whole.parts("other", {"seed": b"3"}))
        with monkeypatch.context() as patch:
            patch.setattr(request_body, "PIECE_BYTES", piece_bytes)
            pieces = read_body(data, JSON)
            assert (pieces.prefixes, b"".join(pieces.parts("other", {"seed": b"3"}))) == expected
        assert json.loads(expected[1]) == json.loads(data) | {"model": "other", "seed": 3}


def test_a_large_body_is_scanned_once_and_copied_nowhere_and_all_else_is_done_in_a_thread_in_small_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_scans, on_loop, written = 0, list[bool](), list[int]()
    decode, find, pieces = request_body._decode_fields, RequestBody._find_prefixes, upstream._pieces
    loops_thread = threading.get_ident()

    def counted(data: bytes) -> Any:
        nonlocal num_scans
        num_scans += 1
        return decode(data)

    def noted(self: RequestBody) -> Any:
        on_loop.append(threading.get_ident() == loops_thread)
        return find(self)

    def measured(message: Any, num_bytes: int) -> Iterator[Any]:
        for piece in pieces(message, num_bytes):
            written.append(len(piece))
            yield piece

    monkeypatch.setattr(request_body, "_decode_fields", counted)
    monkeypatch.setattr(RequestBody, "_find_prefixes", noted)
    monkeypatch.setattr(upstream, "_pieces", measured)

    async def run() -> None:
        async with fake_servers(answer_plainly, answer_plainly) as servers:
            addresses = [one.address for one in servers]
            async with gateway({"a": {"addresses": addresses}}) as gate:
                content = "words " * 700_000
                answer = await gate.ask(messages=[{"role": "user", "content": content}])
                assert answer.status_code == 200
                (asked,) = (asked for server in servers for asked in server.asked)
                assert asked.json["messages"][0]["content"] == content
                body = max(len(asked.body), 1)
                assert num_scans == 1 and on_loop == [False]
                assert max(written) <= request_body.PIECE_BYTES < body and sum(written) >= body

    asyncio.run(run())  # a jumping clock would not wait for threads
    assert read_body(data := b'{"a": 1}', JSON).parts()[0] is data
