"""Every flag of the HTTP server (`ServerArgs`); `octavo.config.EngineArgs` has those of the engine.

`octavo serve` and `python -m octavo.entrypoints.openai.api_server` both fill it. `check` refuses flags that cannot be
honoured before anything starts. No web framework is imported here.
"""

import importlib
import inspect
import json
import math
import os
import runpy
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from octavo import trace_export
from octavo.api_keys import check_keys, key_of, with_environment
from octavo.entrypoints.chat.reasoning import STYLES
from octavo.entrypoints.chat.tools.tool_formats import AUTO, FORMATS, NONE
from octavo.entrypoints.http.request_limits import RequestLimits
from octavo.errors import ConfigError
from octavo.flags import Flags, flag
from octavo.peer_addresses import PeerAddresses

_SECONDS = (
    "max_ttft",
    "max_request_time",
    "body_timeout",
    "write_timeout",
    "shutdown_timeout",
    "engine_ready_timeout",
    "engine_step_timeout",
    "stream_keep_alive",
)
# Headers of answers that clients read, and that browsers hide from pages of other origins unless the answer names them.
_FOR_PAGES = ("X-Request-Id", "request-id", "Retry-After", "metadata")
LogLevel = Literal["critical", "error", "warning", "info", "debug", "trace"]


@dataclass(frozen=True, kw_only=True)
class ServerArgs(RequestLimits, Flags):
    """The flags of the server. Field `api_key` is flag `--api-key`."""

    host: str = flag("0.0.0.0", "Address to listen at.")
    port: int = flag(8000, "Port to listen at; 0 is any free one.")
    api_key: list[str] = flag(
        [], "Keys; a client must send one of them as bearer token. Also OCTAVO_API_KEY or VLLM_API_KEY."
    )
    kv_cache_peers: list[str] = flag(
        [], "Servers that compute prompts for this one (docs/gateway.md): addresses, or networks such as "
        "10.244.0.0/16:8000 of servers that a gateway finds. Their blocks are copied into --kv-cache-disk. They are "
        "sent OCTAVO_KV_CACHE_PEER_KEY, or else this server's first API key."
    )  # fmt: skip
    ssl_keyfile: str | None = flag(None, "Private key file (PEM), for HTTPS.")
    ssl_certfile: str | None = flag(None, "Certificate file (PEM), for HTTPS.")
    ssl_ca_certs: str | None = flag(
        None, "Certificates (PEM) of authorities; clients must show a certificate that one of them signed.",
        needs="ssl_certfile",
    )  # fmt: skip
    ssl_ciphers: str | None = flag(
        None, "Ciphers of TLS 1.2 as OpenSSL lists them; default: OpenSSL's.", needs="ssl_certfile"
    )
    headless: bool = flag(
        False, "Run as a node of --nnodes other than node 0, or a host of --data-parallel-size-local, without HTTP."
    )
    api_server_count: int = flag(
        1, "Processes that answer requests; all share the engines. Use several if one lacks the processor time for "
        "all streams.", positive=True, short="-asc",
    )  # fmt: skip
    uds: str | None = flag(None, "Path of a Unix socket to listen at, instead of --host and --port.")
    middleware: list[str] = flag(
        [], "ASGI middlewares: package.module.Class, or functions of (request, call_next); the first is the outermost."
    )
    default_chat_template_kwargs: dict[str, Any] | None = flag(
        None, "Variables of the chat template, as JSON, for requests whose chat_template_kwargs leave them out."
    )
    trust_request_chat_template: bool = flag(
        False, "Let requests bring a chat_template: a program that runs in a sandbox, but without a time limit."
    )
    root_path: str = flag("", "Path under which a proxy offers this server, such as /llm.")
    allowed_origins: list[str] = flag([], "Web origins that browsers may call from; default: any.")
    allowed_methods: list[str] = flag([], "Methods that browsers may call with from other origins; default: any.")
    allowed_headers: list[str] = flag([], "Headers that browsers may send from other origins; default: any.")
    allow_credentials: bool = flag(False, "Let browsers send credentials such as cookies from other origins.")
    chat_template_content_format: Literal["auto", "string", "openai"] = flag(
        "auto", "What chat templates get as a message's content: its text (string), or a list of parts of type text "
        "(openai); auto is openai if the template only reads lists.",
    )  # fmt: skip
    enable_request_id_headers: bool = flag(True, "Send X-Request-Id with every answer.")
    enable_prompt_tokens_details: bool = flag(True, "Say in the usage how many tokens of the prompt were cached.")
    enable_force_include_usage: bool = flag(
        False, "End every stream with the usage, and put the usage so far into its chunks, even if a request does "
        "not ask for it.",
    )  # fmt: skip
    return_tokens_as_token_ids: bool = flag(
        False, "Write tokens as token_id:N in log-probabilities, unless a request says otherwise."
    )
    response_role: str = flag("assistant", "Role of the messages that chat completions return.")
    max_log_len: int | None = flag(100, "Characters of a prompt in the request log; 0: none.")
    enable_log_requests: bool = flag(True, "Log requests.")
    disable_log_requests: bool = flag(False, "Do not log requests: the older name of --no-enable-log-requests.")
    log_format: Literal["text", "json"] = flag("text", "Form of the log: text, or JSON objects, one a line.")
    otlp_traces_endpoint: str | None = flag(
        None, "URL of an OpenTelemetry collector, which gets a span for each request; needs scripts/install otel."
    )
    uvicorn_log_level: LogLevel = flag("warning", "Log level of the HTTP server; info logs every HTTP request.")
    disable_uvicorn_access_log: bool = flag(False, "Do not log HTTP requests, whatever the level.")
    max_queue_len: int | None = flag(
        None, "The most requests that may wait to be scheduled; further ones get 429 with Retry-After. Default: no "
        "limit.",
    )  # fmt: skip
    max_ttft: float | None = flag(
        None, "Seconds within which the first token must come. A request whose first token is predicted to come "
        "later, after those of the requests before it, gets 429 with Retry-After. Default: no limit.",
        positive=True,
    )  # fmt: skip
    max_request_time: float | None = flag(
        None, "Seconds from its arrival after which a request ends with the text that it has. Default: no limit.",
        positive=True,
    )  # fmt: skip
    max_body_bytes: int = flag(16 << 20, "The most bytes of a request's body.", positive=True)
    max_file_bytes: int = flag(100 << 20, "The most bytes of an uploaded file.", positive=True)
    body_timeout: float = flag(60.0, "Seconds within which a request's body must arrive.", positive=True)
    unknown_fields: Literal["error", "warn", "ignore"] = flag(
        "error", "What happens to fields that the server does not know, and to hints that the model cannot follow "
        "(reasoning_effort, verbosity): error refuses them, warn logs them and goes on without, ignore says nothing.",
    )  # fmt: skip
    stream_keep_alive: float = flag(
        15.0, "Seconds of silence after which a stream gets a comment, so that proxies keep it open; 0: never."
    )
    write_timeout: float = flag(
        60.0, "Seconds within which a client must read some of its answer, or its connection is cut; 0: no limit."
    )
    max_connections: int = flag(
        4096, "The most connections at once. A further one closes the connection that has been idle longest, or is "
        "refused.", positive=True,
    )  # fmt: skip
    shutdown_timeout: float = flag(
        20.0, "Seconds that running requests may take after SIGTERM; then they end with the text that they have."
    )
    response_store: str | None = flag(
        None, "SQLite file that keeps responses, stored chats, files and batches; servers may share it. Default: in "
        "memory.",
    )  # fmt: skip
    response_store_bytes: int = flag(
        256 << 20, "Bytes of the store. If it is full, the oldest entries leave first; files and batches stay.",
        positive=True,
    )  # fmt: skip
    max_engine_restarts: int = flag(
        3, "Restarts of an engine that dies again and again, each time within a minute of its start; the next death "
        "ends the server.",
    )  # fmt: skip
    on_engine_death: Literal["continue", "fail"] = flag(
        "continue", "What happens to requests if their engine dies or hangs. continue: the next engine continues "
        "them, and streams only pause. fail: they get an error.",
    )  # fmt: skip
    engine_ready_timeout: float = flag(
        600.0, "Seconds after which an engine process that still loads is killed and its start fails; 0: no limit."
    )
    engine_step_timeout: float = flag(
        300.0, "Seconds without a finished step after which a busy engine process is killed and restarted; 0: no limit."
    )
    enable_prometheus: bool = flag(False, "Allow --prometheus-port; /metrics has the metrics in any case.")
    prometheus_port: int | None = flag(
        None, "A separate port for metrics, with --enable-prometheus.", needs="enable_prometheus"
    )
    enable_server_load_tracking: bool = flag(
        False, "Accepted without effect: running requests are always counted for /load."
    )
    enable_tokenizer_info_endpoint: bool = flag(
        False, "Offer /tokenizer_info: the tokenizer's configuration and chat template."
    )
    enable_server_dev_mode: bool = flag(
        False, "Offer /sleep, /wake_up, /pause, /resume and /reset_prefix_cache. Also OCTAVO_SERVER_DEV_MODE=1."
    )
    enable_auto_tool_choice: bool = flag(True, "Let the model choose whether to call tools.")
    answer_memory_bytes: int = flag(
        64 << 20, "Bytes for the tokens of answers. If a history has an answer of this server, the prompt holds the "
        "answer's original tokens. 0: none; the prompt is the chat template's text.",
    )  # fmt: skip
    tool_call_parser: str = flag(
        AUTO, f"Format of the model's tool calls: auto (recognised), none, {', '.join(FORMATS)}."
    )
    tool_parser_plugin: str | None = flag(
        None, "Python file that adds formats for --tool-call-parser, with register_tool_format; see docs/tools.md."
    )
    reasoning_parser: str = flag(
        AUTO, f"Format of the model's reasoning: auto (recognised), none, {', '.join(STYLES)}."
    )

    @property
    def is_dev_mode(self) -> bool:
        """Return whether the flag or the environment enables dev mode."""
        return self.enable_server_dev_mode or os.environ.get("OCTAVO_SERVER_DEV_MODE") == "1"

    @property
    def api_keys(self) -> list[str]:
        """Return the keys of the flag and of the environment."""
        return with_environment(self.api_key)

    @property
    def peers(self) -> PeerAddresses:
        """Return --kv-cache-peers as read. Raises `ConfigError`."""
        return PeerAddresses(self.kv_cache_peers)

    @property
    def peer_key(self) -> str | None:
        """Return the API key for the servers of --kv-cache-peers."""
        return next(filter(None, [key_of("OCTAVO_KV_CACHE_PEER_KEY"), *self.api_keys]), None)

    @property
    def logs_requests(self) -> bool:
        return self.enable_log_requests and not self.disable_log_requests

    @property
    def cors(self) -> dict[str, Any]:
        """Return the arguments of Starlette's CORSMiddleware. Lists may also be in vLLM's form, one text of JSON."""
        lists = ("allowed_origins", "allowed_methods", "allowed_headers")
        found = {name.replace("allowed", "allow"): _words(name, getattr(self, name)) or ["*"] for name in lists}
        return {**found, "allow_credentials": self.allow_credentials, "expose_headers": _FOR_PAGES}

    @property
    def access_log(self) -> bool:
        """Return whether every HTTP request is logged."""
        return self.uvicorn_log_level in ("info", "debug", "trace") and not self.disable_uvicorn_access_log

    def check(self) -> None:
        """Raise `ConfigError` for flags that cannot be honoured."""
        self.check_flags()
        for name in ("port", "prometheus_port"):
            port = getattr(self, name)
            if port is not None and not 0 <= port < 65536:
                raise ConfigError(f"--{name.replace('_', '-')} must be between 0 and 65535, got {port}.")
        check_keys("--api-key", self.api_key)
        if self.peers.has_networks and (not self.peer_key or self.peer_key in self.api_keys):
            raise ConfigError(
                "--kv-cache-peers with a network needs OCTAVO_KV_CACHE_PEER_KEY, the API key of the servers there. It "
                "must be none of this server's API keys: whoever has it can name any host of the network."
            )
        if self.kv_cache_peers and self.peer_key is None:
            raise ConfigError("--kv-cache-peers needs the servers' API key: set --api-key or OCTAVO_KV_CACHE_PEER_KEY.")
        if self.max_log_len is not None and self.max_log_len < 0:
            raise ConfigError(f"--max-log-len must be 0 or more, got {self.max_log_len}.")
        for name in ("max_queue_len", "max_engine_restarts", "answer_memory_bytes", *_SECONDS):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ConfigError(f"--{name.replace('_', '-')} must be 0 or more, got {value}.")
        if self.api_server_count > 1:
            self._check_front_ends()
        if self.root_path and not self.root_path.startswith("/"):
            raise ConfigError(f"--root-path must start with /, got {self.root_path}.")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ConfigError("--ssl-keyfile and --ssl-certfile go together: give both or neither.")
        for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs"):
            path = getattr(self, name)
            if path is not None and not Path(path).is_file():
                raise ConfigError(f"--{name.replace('_', '-')}: there is no file {path}.")
        if self.uds is not None and self.ssl_certfile is not None:
            raise ConfigError("--uds and --ssl-certfile exclude each other: a socket of the file system needs no TLS.")
        if self.ssl_certfile is not None:
            self._check_certificate(self.ssl_certfile)
        if self.otlp_traces_endpoint is not None:
            trace_export.check_endpoint(self.otlp_traces_endpoint)
        if self.tool_parser_plugin is not None:
            _run_plugin(self.tool_parser_plugin)
        for name, formats in (("tool_call_parser", FORMATS), ("reasoning_parser", STYLES)):
            value, known = getattr(self, name), (AUTO, NONE, *formats)
            if value not in known:
                raise ConfigError(f"--{name.replace('_', '-')} must be one of {', '.join(known)}, got {value!r}.")
        _ = self.cors, self.middlewares
        if self.response_store is not None:
            from octavo.entrypoints.http.store import check_store

            check_store(self.response_store, self.response_store_bytes)

    def _check_front_ends(self) -> None:
        """Raise `ConfigError` for flags that go with one front end only."""
        several = f"--api-server-count {self.api_server_count}"
        if self.headless:
            raise ConfigError(f"{several} and --headless exclude each other: a headless process answers no requests.")
        if self.prometheus_port is not None:
            raise ConfigError(
                f"{several} and --prometheus-port exclude each other: read /metrics at the server's port, which has "
                "the sums of all front ends."
            )
        if sys.platform == "win32":
            raise ConfigError(f"{several} needs sockets that processes inherit, which Windows lacks.")

    @property
    def middlewares(self) -> list[Any]:
        """Return the classes and functions of --middleware. Raises `ConfigError`."""
        found = []
        for path in self.middleware:
            module, _, name = path.rpartition(".")
            try:
                found.append(getattr(importlib.import_module(module), name))
            except (ImportError, AttributeError, ValueError) as error:
                raise ConfigError(f"--middleware {path} cannot be imported: {error}.") from None
            if not (inspect.isclass(found[-1]) or inspect.iscoroutinefunction(found[-1])):
                raise ConfigError(f"--middleware {path} is neither a class nor a coroutine function.")
        return found

    def _check_certificate(self, certfile: str) -> None:
        import ssl

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        if self.ssl_ciphers is not None:
            try:
                context.set_ciphers(self.ssl_ciphers)
            except ssl.SSLError:
                raise ConfigError(f"--ssl-ciphers {self.ssl_ciphers} names no cipher that OpenSSL has.") from None
        try:
            context.load_cert_chain(certfile, self.ssl_keyfile)
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(
                f"--ssl-certfile {certfile} and --ssl-keyfile {self.ssl_keyfile} are not a certificate and its key in "
                f"PEM form: {error}."
            ) from None


def _words(name: str, given: list[str]) -> list[str]:
    """Return the items of a list that may be given as one text of JSON. Raises `ConfigError`."""
    if len(given) != 1 or not given[0].startswith("["):
        return given
    try:
        words = json.loads(given[0])
    except json.JSONDecodeError:
        words = None
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ConfigError(f"--{name.replace('_', '-')} {given[0]} is not a JSON list of strings.")
    return words


def _run_plugin(path: str) -> None:
    """Run the file of --tool-parser-plugin. Raises `ConfigError` if it fails, as files for vLLM's classes do."""
    try:
        runpy.run_path(path)
    except Exception as error:
        raise ConfigError(
            f"--tool-parser-plugin {path} fails: {type(error).__name__}: {error}. It is to call register_tool_format "
            "of octavo.entrypoints.chat.tools.tool_formats; vLLM's parser classes are not built."
        ) from None
