"""`octavo chat` and `octavo complete`: use a running server from the terminal, with streaming."""

import argparse
import http.client
import json
import re
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import msgspec

from octavo.api_keys import check_keys, sent_by_default
from octavo.entrypoints.cli import command, run_command, show_error
from octavo.entrypoints.cli.answer_view import AnswerView, PlainView, make_view
from octavo.entrypoints.cli.typed_lines import typed_lines
from octavo.errors import OctavoError
from octavo.flags import FlagParser
from octavo.sse_reader import EventReader

T = TypeVar("T")

TIMEOUT_S = 600
_HISTORY = "$XDG_STATE_HOME/octavo/history, by default in ~/.local/state"


def make_chat_parser(prog: str) -> FlagParser:
    parser = _make_parser(prog, "Talk to a running server. Ctrl-C stops an answer, Ctrl-D ends.")
    parser.for_more_words = "A message follows -q; `octavo run MODEL` starts a server of MODEL and chats with it."
    parser.add_argument("--system-prompt", help="The system message before the conversation.")
    parser.add_argument("-q", "--quick", metavar="MESSAGE", help="Send one message, print the answer and end.")
    parser.add_argument(
        "--plain", action="store_true", help="Print answers as they are; without it a terminal shows Markdown."
    )
    return parser


def make_complete_parser(prog: str) -> FlagParser:
    parser = _make_parser(prog, "Continue texts with a running server. Ctrl-C stops a text, Ctrl-D ends.")
    parser.for_more_words = "A text follows -q; `octavo serve MODEL` starts a server."
    parser.add_argument("-q", "--quick", metavar="TEXT", help="Continue one text and end.")
    return parser


def chat(argv: Sequence[str] | None = None, *, prog: str = "octavo chat") -> int:
    """Chat until end of file (Ctrl-D), or ask the question of --quick. Return the exit code."""
    args = make_chat_parser(prog).parse_args(argv)

    return run_command(lambda: talk(args))


def talk(args: argparse.Namespace) -> None:
    """Chat with the server and the model of the parsed arguments."""
    client = ApiClient(args)
    is_typed = _is_typed(args)
    if is_typed:
        print(f"{client.model}. Ctrl-C stops an answer, Ctrl-D ends, /help has more.", file=sys.stderr)
    messages = _first_messages(args)
    for text in _texts(args):
        if args.quick is None and (command := _COMMAND.fullmatch(text.rstrip())):
            _run_typed_command(command["name"], command["file"], messages, args)
            continue
        messages.append({"role": "user", "content": text})
        choices = client.stream("/chat/completions", messages=messages)
        answer = _print_answer(choices, _delta_parts, make_view(plain=args.plain), goes_on=is_typed)
        client.print_stats()
        if answer is None:  # without an answer the question is dropped from the conversation
            messages.pop()
        else:
            messages.append({"role": "assistant", "content": answer})


@command(make_complete_parser, "octavo complete")
def complete(args: argparse.Namespace) -> None:
    """Continue each typed line until end of file, or the text of --quick."""
    client = ApiClient(args)
    for text in _texts(args):
        choices = client.stream("/completions", prompt=text)
        _print_answer(choices, lambda choice: ("", choice.text or ""), PlainView(), goes_on=_is_typed(args))
        client.print_stats()


def _is_typed(args: argparse.Namespace) -> bool:
    return sys.stdin.isatty() and args.quick is None


def _texts(args: argparse.Namespace) -> Iterator[str]:
    return typed_lines(keeps_history=args.history) if args.quick is None else iter([args.quick])


def _first_messages(args: argparse.Namespace) -> list[dict[str, str]]:
    return [{"role": "system", "content": args.system_prompt}] if args.system_prompt else []


class _Delta(msgspec.Struct, frozen=True):
    reasoning_content: str | None = None
    reasoning: str | None = None  # its other name
    content: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    """A choice of a chunk: of a completion with a text, of a chat with a delta."""

    text: str | None = None
    delta: _Delta = _Delta()


class _Usage(msgspec.Struct, frozen=True):
    completion_tokens: int = 0


class _Chunk(msgspec.Struct, frozen=True):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None


def _delta_parts(choice: _Choice) -> tuple[str, str]:
    """Return the reasoning and the answer in a chunk of a chat."""
    delta = choice.delta
    return delta.reasoning_content or delta.reasoning or "", delta.content or ""


# A line that begins with one word after a slash. A blank before the slash sends it to the model.
_COMMAND = re.compile(r"/(?P<name>[a-z]+)(?: +(?P<file>.+))?")
_COMMAND_HELP = """\
/clear      forget the conversation
/save FILE  write the conversation to a new file, as Markdown
/help       this
Up and down recall what you have typed, in earlier runs too (--no-history keeps nothing)."""


def _run_typed_command(name: str, file: str | None, messages: list[dict[str, str]], args: argparse.Namespace) -> None:
    match name, file:
        case "clear", None:
            messages[:] = _first_messages(args)
            print("The conversation is forgotten.", file=sys.stderr)
        case "save", str():
            parts = [f"## {message['role']}\n\n{message['content'].strip()}\n" for message in messages]
            try:
                with open(Path(file).expanduser(), "x", encoding="utf-8") as saved:
                    saved.write("\n".join(parts))
                print(f"Saved to {file}.", file=sys.stderr)
            except OSError as error:
                show_error(f"the conversation cannot be saved to {file}: {error.strerror}.")
        case "help", None:
            print(_COMMAND_HELP, file=sys.stderr)
        case _:
            asked = f"/{name}" if file is None else f"/{name} {file}"
            show_error(f"{asked} is no command: /clear, /save FILE and /help are. A blank before / sends the line.")


def _make_parser(prog: str, description: str) -> FlagParser:
    """Return a parser of flags for the server, the model and the answers."""
    parser = add_server_flags(FlagParser(prog=prog, description=description))
    parser.add_argument("--model", "--model-name", help="Default: the first model that the server lists.")
    parser.add_argument("--max-tokens", type=int, help="The most tokens of an answer.")
    parser.add_argument("--temperature", type=float, help="0 is greedy; default: the server's.")
    parser.add_argument("--stats", action="store_true", help="Print the time to the first token and tokens/s.")
    parser.add_argument(
        "--history", action=argparse.BooleanOptionalAction, default=True,
        help=f"Whether lines typed on a terminal are kept in a file ({_HISTORY}), to be recalled in later runs.",
    )  # fmt: skip
    return parser


def add_server_flags(parser: FlagParser) -> FlagParser:
    """Add the flags that name a server, and return the parser."""
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="The server's API (default: %(default)s).")
    parser.add_argument("--api-key", default=sent_by_default(), help="Default: OCTAVO_API_KEY, or OPENAI_API_KEY.")
    return parser


def _print_answer(
    choices: Generator[_Choice, None, None],
    parts_of: Callable[[_Choice], tuple[str, str]],
    view: AnswerView,
    *,
    goes_on: bool,
) -> str | None:
    """Show an answer as it comes, and return it without its reasoning. If the program `goes_on` after it, Ctrl-C keeps
    the answer so far; an error is printed as a line, and None is returned."""
    answer, is_begun = "", False
    error: OctavoError | None = None
    try:
        for choice in choices:
            thought, text = parts_of(choice)
            is_begun |= bool(thought or text)
            if thought:
                view.think(thought)
            if text:
                answer += text
                view.add(text)
    except KeyboardInterrupt:
        if not goes_on:
            raise
    except OctavoError as raised:
        error = raised
    finally:
        choices.close()
        if is_begun or error is None:
            view.end()
    if error is None:
        return answer
    if not goes_on:
        raise error
    show_error(str(error))
    return None


class Served(msgspec.Struct):
    """An entry of GET /v1/models. `root` and `state` are Octavo's."""

    id: str
    root: str | None = None
    state: str = "ready"


class _ServedList(msgspec.Struct):
    data: list[Served] | None = None


class NoServerError(OctavoError):
    """Nothing answers at an address."""


class StatusError(OctavoError):
    """A server answers with a status that is no success."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class ApiClient:
    """A client of the running server that the arguments of `add_server_flags` name. Every failure is an `OctavoError`.
    `model` is the arguments' model, or else the first that the server lists; empty if none is needed."""

    def __init__(self, args: argparse.Namespace, *, needs_model: bool = True) -> None:
        url = urlsplit(args.url if "://" in args.url else "http://" + args.url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise OctavoError(f"--url {args.url} is no HTTP address, such as http://127.0.0.1:8000/v1.")
        self._url = args.url
        self._secure = url.scheme == "https"
        self._address = url.netloc
        self._path = url.path.rstrip("/") or "/v1"
        self._headers = {"Content-Type": "application/json"}
        if args.api_key:
            check_keys("--api-key or its variable", [args.api_key])
            self._headers["Authorization"] = f"Bearer {args.api_key}"
        self._options = {
            name: value for name in ("max_tokens", "temperature") if (value := getattr(args, name, None)) is not None
        }
        self._stats = ""  # of the last answer
        if getattr(args, "stats", False):
            self._options["stream_options"] = {"include_usage": True}
        self.model: str = (args.model or self._first_model()) if needs_model else ""

    def stream(self, path: str, **body: Any) -> Generator[_Choice, None, None]:
        """Yield the first choice of every chunk. Closing the iterator hangs up, which ends the request on the
        server."""
        body = {"model": self.model, "stream": True, **self._options, **body}
        self._stats = ""
        begun, first = time.monotonic(), None
        with closing(self.request("POST", path, body)) as response:
            events = EventReader()
            while data := response.read1():
                for event in events.feed(data):
                    if event.strip() == b"[DONE]":
                        return
                    chunk = self._parsed(event)
                    if "error" in chunk:
                        raise OctavoError(_error_message(event))
                    read = self._read_as(_Chunk, path, chunk)
                    if read.choices:
                        # The chunk of a chat's role comes before any token.
                        if first is None and (read.choices[0].text or any(_delta_parts(read.choices[0]))):
                            first = time.monotonic()
                        yield read.choices[0]
                    elif read.usage is not None and first is not None:
                        self._stats = _stats(first - begun, time.monotonic() - first, read.usage.completion_tokens)
        raise OctavoError(f"{self._url} ended the answer too early.")

    def print_stats(self) -> None:
        """Print the statistics of the last answer, if they were asked for and it is complete."""
        if self._stats:
            print(self._stats, file=sys.stderr)

    def _first_model(self) -> str:
        names = self.model_names()
        if not names:
            raise OctavoError(f"{self._url} names no model for this key; ask for one with --model.")
        return names[0]

    def model_names(self) -> list[str]:
        return [one.id for one in self.models()]

    def models(self) -> list[Served]:
        """Return what GET /v1/models lists."""
        return self.ask_for(_ServedList, "GET", "/models").data or []

    def has_model(self, name: str) -> bool:
        """Return whether the server has a model. Raises `OctavoError` if it has one that this key may not use."""
        if name in self.model_names():
            return True
        try:
            self.request("GET", f"/models/{quote(name)}", None).close()
        except StatusError as error:
            if error.status == 403:
                raise
        return False

    def ask_for(
        self, kind: type[T], method: str, path: str, body: dict[str, Any] | None = None, *, from_root: bool = False
    ) -> T:
        """Return the object that answers a request, with the fields of `kind`. Raises `OctavoError` if they differ."""
        with closing(self.request(method, path, body, from_root=from_root)) as response:
            return self._read_as(kind, path, self._parsed(response.read()))

    def _read_as(self, kind: type[T], path: str, answer: dict[str, Any]) -> T:
        try:
            return msgspec.convert(answer, kind)
        except msgspec.ValidationError as error:
            raise OctavoError(f"the answer of {self._url} to {path} has a wrong form: {error}.") from None

    def _parsed(self, data: bytes) -> dict[str, Any]:
        try:
            found = json.loads(data)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise OctavoError(f"{self._url} answers no JSON object: is it the address of an OpenAI API, with its /v1?")
        return found

    def request(
        self, method: str, path: str, body: dict[str, Any] | None, *, from_root: bool = False
    ) -> http.client.HTTPResponse:
        """Return the answer to a request for a path below the API's, or below the server's own (`from_root`). Raises
        `OctavoError` if it is no success."""
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._address, timeout=TIMEOUT_S)
        try:
            # "Connection: close" makes the response own the socket, so that closing it hangs up.
            headers = {**self._headers, "Connection": "close"}
            data = None if body is None else json.dumps(body).encode()
            prefix = self._path.removesuffix("/v1") if from_root else self._path
            connection.request(method, prefix + path, body=data, headers=headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise NoServerError(
                f"no server answers at {self._url} ({error}); start one with 'octavo serve', or give --url."
            ) from None
        if response.status != 200:
            said = _error_message(response.read())
            if response.status == 401:
                said = f"{said} (It needs an API key, or a different one: --api-key, or the variable OCTAVO_API_KEY.)"
            raise StatusError(f"{self._url} answered {response.status}: {said}", response.status)
        return response


def _stats(first_s: float, others_s: float, num_tokens: int) -> str:
    """Return a line of an answer: the seconds to its first token, and the rate of the others."""
    rate = f", then {(num_tokens - 1) / others_s:.1f} tokens/s" if num_tokens > 1 and others_s > 0 else ""
    return f"{num_tokens} tokens: the first after {first_s * 1000:.0f} ms{rate}"


def _error_message(body: bytes) -> str:
    try:
        error = json.loads(body)["error"]
        message: str = error if isinstance(error, str) else error["message"]
    except (ValueError, KeyError, TypeError):
        text = " ".join(body.decode(errors="replace").split())
        return "the answer is a web page; check the API's address" if text.startswith("<") else text[:200]
    return message
