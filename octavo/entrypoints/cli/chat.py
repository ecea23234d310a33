"""`octavo chat`: a conversation with a running server, in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Generator, Sequence

from octavo.entrypoints.cli.client import ApiClient, make_parser, print_answer, typed_lines
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
            print_answer(_answer(client, [*messages, {"role": "user", "content": args.quick}]), goes_on=False)
            return
        is_typed = sys.stdin.isatty()
        if is_typed:
            print(f"{client.model}. Ctrl-C stops an answer, Ctrl-D ends.", file=sys.stderr)
        for text in typed_lines():
            messages.append({"role": "user", "content": text})
            answer = print_answer(_answer(client, messages), goes_on=is_typed)
            if answer is None:  # the question was not answered, so it is not part of the conversation
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": answer})

    return run_command(chat)


def _answer(client: ApiClient, messages: list[dict[str, str]]) -> Generator[str, None, None]:
    for choice in client.stream("/chat/completions", messages=messages):
        yield choice["delta"].get("content") or ""
