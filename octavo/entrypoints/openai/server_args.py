"""Every flag of the HTTP server once (`ServerArgs`), as `octavo.config.EngineArgs` does for the engine.

`octavo serve` and `python -m octavo.entrypoints.openai.api_server` both fill it; `check` refuses what cannot be
honoured before anything is started. No web framework is imported here.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from octavo.config import _flag, add_dataclass_flag
from octavo.errors import ConfigError

LogLevel = Literal["critical", "error", "warning", "info", "debug", "trace"]


@dataclass(frozen=True, kw_only=True)
class ServerArgs:
    """What a user can set about the server. Field `api_key` is flag `--api-key`."""

    host: str = _flag("0.0.0.0", "Address to listen at.")
    port: int = _flag(8000, "Port to listen at; 0 is any free one.")
    api_key: list[str] = _flag([], "Key that clients must send as bearer token; repeatable. Also OCTAVO_API_KEY.")
    ssl_keyfile: str | None = _flag(None, "Private key file (PEM), for HTTPS.")
    ssl_certfile: str | None = _flag(None, "Certificate file (PEM), for HTTPS.")
    root_path: str = _flag("", "Path under which a proxy offers this server, such as /llm.")
    allowed_origins: list[str] = _flag([], "Web origins that browsers may call from; default: any.")
    response_role: str = _flag("assistant", "Role of the messages that chat completions return.")
    chat_template: str | None = _flag(None, "File with a Jinja chat template, or the template; default: the model's.")
    max_log_len: int | None = _flag(100, "Characters of a prompt in the request log; 0 is none.")
    disable_log_requests: bool = _flag(False, "Do not log requests.")
    uvicorn_log_level: LogLevel = _flag("warning", "Log level of the HTTP server; info logs every HTTP request.")
    enable_prometheus: bool = _flag(False, "Serve metrics; they are at /metrics in any case.")
    prometheus_port: int | None = _flag(None, "Port of its own for metrics, with --enable-prometheus.")
    enable_auto_tool_choice: bool = _flag(False, "Let the model choose among tools.", built=False)
    tool_call_parser: str | None = _flag(None, "Format of the model's tool calls.", built=False)
    reasoning_parser: str | None = _flag(None, "Format of the model's reasoning.", built=False)

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> None:
        """Add one flag per field."""
        group = parser.add_argument_group("server")
        hints = typing.get_type_hints(cls)
        for f in dataclasses.fields(cls):
            add_dataclass_flag(group, f, hints[f.name])

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> ServerArgs:
        """The fields of `cls` out of parsed arguments."""
        return cls(**{f.name: getattr(args, f.name) for f in dataclasses.fields(cls)})

    @property
    def api_keys(self) -> list[str]:
        """The keys of the flag and of the environment."""
        from_env = os.environ.get("OCTAVO_API_KEY")
        return [*self.api_key, *([from_env] if from_env else [])]

    @property
    def origins(self) -> list[str]:
        """Allowed origins; vLLM's form, one JSON list, is read too."""
        if len(self.allowed_origins) == 1 and self.allowed_origins[0].startswith("["):
            try:
                origins = json.loads(self.allowed_origins[0])
            except json.JSONDecodeError:
                origins = None
            if not isinstance(origins, list) or not all(isinstance(origin, str) for origin in origins):
                raise ConfigError(f"--allowed-origins {self.allowed_origins[0]} is not a JSON list of origins.")
            return origins
        return self.allowed_origins or ["*"]

    def check(self) -> None:
        """Raise `ConfigError` for whatever cannot be honoured."""
        for f in dataclasses.fields(self):
            if not f.metadata["built"] and getattr(self, f.name) != f.default:
                raise ConfigError(f"--{f.name.replace('_', '-')} is not built yet; leave it out.")
        for name in ("port", "prometheus_port"):
            port = getattr(self, name)
            if port is not None and not 0 <= port < 65536:
                raise ConfigError(f"--{name.replace('_', '-')} must be between 0 and 65535, got {port}.")
        if any(not key for key in self.api_key):
            raise ConfigError("--api-key must not be empty.")
        if self.max_log_len is not None and self.max_log_len < 0:
            raise ConfigError(f"--max-log-len must be 0 or more, got {self.max_log_len}.")
        if self.prometheus_port is not None and not self.enable_prometheus:
            raise ConfigError("--prometheus-port needs --enable-prometheus.")
        if self.root_path and not self.root_path.startswith("/"):
            raise ConfigError(f"--root-path must start with /, got {self.root_path}.")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ConfigError("--ssl-keyfile and --ssl-certfile go together: give both or neither.")
        for name in ("ssl_keyfile", "ssl_certfile"):
            path = getattr(self, name)
            if path is not None and not Path(path).is_file():
                raise ConfigError(f"--{name.replace('_', '-')}: there is no file {path}.")
        if self.ssl_certfile is not None:
            self._check_certificate(self.ssl_certfile)
        _ = self.origins, self.chat_template_text()

    def _check_certificate(self, certfile: str) -> None:
        import ssl

        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, self.ssl_keyfile)
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(
                f"--ssl-certfile {certfile} and --ssl-keyfile {self.ssl_keyfile} are not a certificate and its key in "
                f"PEM form: {error}."
            ) from None

    def chat_template_text(self) -> str | None:
        """The template itself: from the file, or as given where it cannot be a file's name."""
        if self.chat_template is None:
            return None
        if any(c in self.chat_template for c in "{}\n"):
            return self.chat_template
        try:
            return Path(self.chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--chat-template {self.chat_template} cannot be read: {error}.") from None
