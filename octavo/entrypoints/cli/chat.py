"""`octavo chat`: a conversation with a running server, in the terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence

from octavo.entrypoints.cli.client import ApiClient, make_parser
from octavo.entrypoints.cli.errors import run_command


def main(argv: Sequence[str] | None = None, *, prog: str = "octavo chat") -> int:
    """Talk until end of file (Ctrl-D), or ask the one question of --quick; returns the exit code."""
    parser = make_parser(prog, "Talk to a running server. Ctrl-C stops an answer, Ctrl-D ends.")
    parser.add_argument("--system-prompt", help="What the model is told before the conversation.")
    parser.add_argument("-q", "--quick", metavar="MESSAGE", help="Send one message, print the answer and end.")
    args = parser.parse_args(argv)

    def chat() -> None:
        client = ApiClient(args)
        messages = [{"role": "system", "content": args.system_prompt}] if args.system_prompt else []
        if args.quick is not None:
            _answer(client, [*messages, {"role": "user", "content": args.quick}])
            return
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # gives input() a history and editing
        print(f"{client.model}. Ctrl-C stops an answer, Ctrl-D ends.", file=sys.stderr)
        while True:
            try:
                text = input("> ")
            except EOFError:
                print()
                return
            if not text.strip():
                continue
            messages.append({"role": "user", "content": text})
            messages.append({"role": "assistant", "content": _answer(client, messages, stoppable=True)})

    return run_command(chat)


def _answer(client: ApiClient, messages: list[dict[str, str]], *, stoppable: bool = False) -> str:
    """Print the answer as it comes, and return it. With `stoppable`, Ctrl-C keeps what there is."""
    answer = ""
    chunks = client.stream("/chat/completions", messages=messages)
    try:
        for choice in chunks:
            text = choice["delta"].get("content") or ""
            answer += text
            print(text, end="", flush=True)
    except KeyboardInterrupt:
        if not stoppable:
            raise
    finally:
        chunks.close()
    print()
    return answer
