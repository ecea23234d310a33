"""Shows a start to the user: how far the weights are loaded, then which model is served and how to use it.

The bar is for terminals. The lines about what is served come on every start; a log of JSON has them in one object.
"""

import json
import logging
import shutil
import socket
import sys
from typing import Any

from octavo.config import EngineConfig
from octavo.engine.wire import Ready
from octavo.entrypoints.http.server_args import ServerArgs
from octavo.logs import JSON
from octavo.terminal_styles import BOLD, has_styles, styled
from octavo.version import __version__

logger = logging.getLogger("octavo.server")

_CLEAR = "\x1b[2K\r"  # ECMA-48: erase the line, and return to its start
_BAR_WIDTH = 30
_LOOPBACKS = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}  # by the address that stands for all interfaces


class StartDisplay:
    """Shows one start. After `clear` or `show_ready` no bar is shown, not even if an engine starts again."""

    def __init__(self, config: EngineConfig, args: ServerArgs, sock: socket.socket) -> None:
        self._args, self._sock = args, sock
        self._name = config.model.served_model_names[0]
        self._shares: dict[int, float] = {}  # loaded share of the weights, by engine
        self._shows_bar = args.log_format != JSON and has_styles(sys.stderr)

    def show_loading(self, engine: int, share: float) -> None:
        """Show that an engine has loaded a share of its weights, from 0 to 1."""
        if not self._shows_bar:
            return
        self._shares[engine] = share
        least = min(self._shares.values())
        if least == 1:
            line = f"Preparing {self._name}: its cache and its first step ..."
        else:
            full = round(_BAR_WIDTH * least)
            line = f"Loading {self._name} [{'#' * full}{'.' * (_BAR_WIDTH - full)}] {least:.0%}"
        # The cursor goes back to the line's start, so that a line of the log takes the bar's place.
        print(f"{_CLEAR}{line[: shutil.get_terminal_size().columns - 1]}\r", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Remove the bar for good."""
        if self._shows_bar and self._shares:
            print(_CLEAR, end="", file=sys.stderr, flush=True)
        self._shows_bar = False

    def show_ready(self, config: EngineConfig, ready: Ready, seconds: float) -> None:
        """Show the models, the room for requests, and the address; on a terminal also the page and a command to try.
        `seconds` is how long the start took."""
        self.clear()
        title = f"Octavo {__version__}, ready in {seconds:.1f} s"
        lines = _what_is_served(config, ready) | {"API": self._api}
        if self._is_open:
            lines["network"] = (
                "open to all interfaces without a key; --host 127.0.0.1 keeps it to this machine, --api-key KEY asks "
                "for a key"
            )
        if self._args.log_format == JSON:
            logger.info(title, extra={"ready": lines})
            return
        if has_styles(sys.stdout):
            if self._args.uds is None:
                lines["page"] = f"{self._root}/ui"
            lines["try"] = self._example(config)
        print(styled(title, BOLD, sys.stdout), flush=True)
        for name, text in lines.items():
            print(f"  {name:<9} {text}", flush=True)

    @property
    def _root(self) -> str:
        """Return the server's address without a route. For a Unix socket the host's name is arbitrary."""
        if self._args.uds is not None:
            return f"http://localhost{self._args.root_path}"
        host, port = self._sock.getsockname()[:2]
        shown_host = _LOOPBACKS.get(host, f"[{host}]" if ":" in host else host)
        scheme = "https" if self._args.ssl_certfile else "http"
        return f"{scheme}://{shown_host}:{port}{self._args.root_path}"

    @property
    def _is_open(self) -> bool:
        """Whether any host that reaches this one may send requests."""
        args = self._args
        is_closed = args.uds is not None or args.api_keys or args.ssl_ca_certs is not None
        return not is_closed and self._sock.getsockname()[0] in _LOOPBACKS

    @property
    def _api(self) -> str:
        return f"{self._root}/v1" if self._args.uds is None else f"{self._args.uds}, path /v1"

    def _example(self, config: EngineConfig) -> str:
        """Return a command that asks the model a question, on one line."""
        words = ["curl"] if self._args.uds is None else ["curl", "--unix-socket", self._args.uds]
        if self._args.api_keys:
            words.append('-H "Authorization: Bearer $OCTAVO_API_KEY"')
        if config.sound is not None:
            return " ".join([*words, "-F file=@speech.wav", f"{self._root}/v1/audio/transcriptions"])
        body: dict[str, Any]
        if config.model.pooling is None:
            path, body = "chat/completions", {"messages": [{"role": "user", "content": "Hello!"}]}
        elif "embed" in config.model.pooling.tasks:
            path, body = "embeddings", {"input": "Hello!"}
        else:
            return " ".join([*words, f"{self._root}/v1/models"])
        words += ["-H 'Content-Type: application/json'", f"-d '{json.dumps(body)}'"]
        return " ".join([*words, f"{self._root}/v1/{path}"])


def _what_is_served(config: EngineConfig, ready: Ready) -> dict[str, str]:
    model = config.model
    num_slots = ready.num_blocks * ready.block_size
    if model.pooling is not None:
        takes = f"texts of up to {model.max_model_len:,} tokens"
        holds = f"gives {' and '.join(model.pooling.tasks)}, {model.pooling.size} numbers each"
    else:
        takes = f"{model.max_model_len:,} tokens of prompt and output together"
        holds = (
            f"{ready.num_blocks:,} blocks of {ready.block_size} = {num_slots:,} tokens: "
            f"{num_slots / model.max_model_len:.1f} requests of full length"
        )
    return {
        "model": f"{', '.join(model.served_model_names)} ({model.checkpoint.format}, {model.dtype}, {config.device})",
        "context": takes,
        "KV cache" if model.pooling is None else "vectors": holds,
    }
