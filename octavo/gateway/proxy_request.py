"""A request as the proxy has it: what it says about its model and session, and the form in which a replica gets it.

The known routes and their traits are here too.
"""

import contextlib
import hashlib
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from urllib.parse import unquote

from octavo.errors import RequestError, similar
from octavo.gateway.client import Client
from octavo.gateway.client_keys import Key
from octavo.gateway.deployment import Deployment
from octavo.gateway.replica import Replica
from octavo.gateway.request_body import MAX_COLONS, RequestBody
from octavo.gateway.stream_progress import RESUMABLE, RESUMABLE_PATHS
from octavo.gateway.upstream import HOP_BY_HOP, Headers, end_to_end
from octavo.gateway.usage_counter import UsageCounter
from octavo.peer_addresses import BLOCKS_AT, BLOCKS_PROOF

MODEL_HEADER = b"x-octavo-model"  # names the model of a request without one in its body
ONLY_PROMPT = b"x-octavo-only-prompt"
PROMPT_NAMES = b"x-octavo-prompt-names"  # which the server tells other gateways
SESSION_HEADER = b"x-session-id"
_ADDRESS_HEADERS = frozenset({
    b"x-forwarded-for", b"forwarded", b"x-real-ip", b"x-client-ip", b"true-client-ip", b"cf-connecting-ip",
    b"cf-connecting-ipv6", b"fly-client-ip", b"x-cluster-client-ip", b"x-envoy-external-address",
    b"x-original-forwarded-for",
})  # fmt: skip
_KEY_HEADERS = frozenset({b"authorization", b"x-api-key"})
_NOT_PASSED_ON = HOP_BY_HOP | {
    b"host", b"content-length", b"expect", b"accept-encoding", MODEL_HEADER, ONLY_PROMPT, PROMPT_NAMES, RESUMABLE,
    BLOCKS_AT.encode(), BLOCKS_PROOF.encode(),
}  # fmt: skip
# Paths of things that one replica keeps; group 1 is the id, absent for new ones and lists.
_KEPT_PATH = re.compile(
    r"/v1/(?:responses|conversations|chat/completions|files|batches)(?:/(?!(?:input_tokens|compact|render|derender|batch)$)([^/]+))?"
)
# Known routes, and their traits. `priority`: the body has that field. `usage`: a stream has a usage only if asked.
# `uncounted`: answers have no usage. `lists`: GET lists what one server keeps.
ROUTES: dict[str, tuple[str, ...]] = {
    "/v1/chat/completions": ("priority", "usage", "lists"),
    **dict.fromkeys(("/v1/completions", "/invocations"), ("priority", "usage")),
    **dict.fromkeys((
        "/v1/responses", "/v1/messages", "/v1/embeddings", "/v2/embed", "/pooling", "/classify", "/score", "/v1/score",
        "/rerank", "/v1/rerank", "/v2/rerank", "/v1/chat/completions/render", "/v1/completions/render",
    ), ("priority",)),
    "/generate": ("priority", "uncounted"),
    "/v1/files": ("lists",),
    "/v1/batches": ("uncounted", "lists"),
    **dict.fromkeys((
        "/v1/conversations", "/v1/models", "/v1/audio", "/v1/cache/sessions", "/tokenize", "/detokenize", "/api/chat",
        "/api/generate", "/api/embed", "/api/embeddings", "/api/tags", "/api/ps", "/api/show", "/api/pull",
        "/api/delete", "/api/version",
    ), ()),
}  # fmt: skip

_SENT_ONCE = ("/v1/files", "/v1/batches", "/v1/conversations")  # where a request makes something


@dataclass(frozen=True)
class ProxyRequest:
    """A request with its whole body. `path` comes from `plain_path`; `target` is path and query as the client wrote
    them."""

    method: str
    path: str
    target: bytes
    headers: Headers
    body: RequestBody
    arrival: float  # time.monotonic
    usage_counter: UsageCounter | None = None  # if the client has a key of the store
    blocks_at: Headers = ()  # name the server that has computed the prompt

    @property
    def owner(self) -> str | None:
        """The id of the client's key."""
        return None if self.usage_counter is None else self.usage_counter.key.id

    @property
    def model(self) -> str | None:
        """The model that the body or else a header names."""
        return self.named_model if self.body.model is None else self.body.model

    @property
    def named_model(self) -> str | None:
        """The model that a header names, in UTF-8 or, as browsers write it, in Latin-1."""
        header = self.header(MODEL_HEADER) or b""
        with contextlib.suppress(UnicodeDecodeError):
            return header.decode() or None
        return header.decode("latin-1")

    @property
    def session(self) -> bytes | None:
        """A digest of the client's session, which is used like a prefix's hash."""
        said = self.body.session_id
        given = self.header(SESSION_HEADER) if said is None else said.encode()
        return None if not given else hashlib.blake2b(b"session " + given, digest_size=16).digest()

    @property
    def conversation(self) -> bytes | None:
        """A digest of the client's session, of the conversation's beginning, or else of the body; None without any."""
        return self.session or self.body.prefixes[1] or self.body.digest

    @property
    def is_of_kept(self) -> bool:
        """Whether the path is of things that one replica keeps."""
        return _KEPT_PATH.match(self.path) is not None

    @property
    def kept_id(self) -> str | None:
        """The id of such a thing in the path; None for new ones and lists."""
        found = _KEPT_PATH.match(self.path)
        return None if found is None else found[1]

    @property
    def may_be_repeated(self) -> bool:
        """Whether the request may reach two replicas, or one twice. Then a model computes twice at most."""
        return self.method not in ("POST", "PATCH") or route_of(self.path) not in (None, *_SENT_ONCE)

    @property
    def traits(self) -> Collection[str]:
        """The traits of the path."""
        return ROUTES.get(self.path, ())

    def headers_for(self, replica: Replica, *, keeps_keys: bool) -> list[tuple[bytes, bytes]]:
        """Return the headers for a replica. With `keeps_keys` it does not get the client's key."""
        own = replica.auth_headers()
        dropped = _NOT_PASSED_ON | _KEY_HEADERS if own or keeps_keys else _NOT_PASSED_ON
        if not replica.upstream.is_near:  # a foreign API is not told the client's address
            dropped |= _ADDRESS_HEADERS
        # If the client itself resumes a stream, the gateway lacks the tokens before, so it could not resume it again.
        if self.body.streams and self.path in RESUMABLE_PATHS and not self.body.is_resumed:
            own.append((RESUMABLE, b"1"))
        # The proof shows whether a guess of the key is right, so only servers that may have the key get it.
        own += [one for one in self.blocks_at if one[0] != BLOCKS_PROOF.encode() or replica.upstream.is_private]
        own.append((b"accept-encoding", b"identity"))  # the gateway reads events and usages in the answer
        return end_to_end(self.headers, dropped) + own

    def header(self, name: bytes) -> bytes | None:
        return next((value for own, value in self.headers if own == name), None)


def plain_path(path: str) -> str:
    """Return a path without the slash at its end: what the gateway may do with a request depends on it. Raises
    `RequestError` for a path that a server, or a proxy before it, may read as another one, such as
    `/v1/audio/../../generate` as `/generate`."""
    segments = unquote(path).replace("\\", "/").removesuffix("/").split("/")
    if not {"", ".", ".."}.isdisjoint(segments[1:]):
        raise RequestError(
            f"{path:.200} has a segment that is empty, `.` or `..`; give the path without.", status=404,
            code="not_found",
        )  # fmt: skip
    return path.removesuffix("/") or "/"


def route_of(path: str) -> str | None:
    """Return the known route of a path, without ids."""
    if path in ROUTES:
        return path
    return next((route for route in ROUTES if path.startswith(route + "/")), None)


def has_prefix(path: str) -> bool:
    """Return whether a known route follows a prefix in `path`, which ends with a slash. The gateway does not do for it
    what it does for the route, such as a look at who has made a file."""
    return route_of(path) is None and any(f"{route}/" in path for route in ROUTES)


def check_use(key: Key, deployment: Deployment) -> None:
    """Raise `RequestError` if a key is not for a model."""
    if not deployment.may_be_used_by(key):
        allowed = ", ".join(key.settings.models or ())
        models = f"its models are: {allowed:.200}" if allowed else "it is for none"
        raise RequestError(
            f"The API key {key.settings.name} is not for the model {deployment.name}; {models}.",
            param="model", status=403, code="model_not_allowed",
        )  # fmt: skip


def counted_request(request: ProxyRequest, key: Key, client: Client) -> ProxyRequest:
    """Return the request as a replica is to get it: with the key's priority, and asking for a usage. Side effects: the
    client gets no usage that only the gateway asks for, and no `usage_counter` if the tokens were counted before.
    Raises `RequestError` for requests that the key may not send, such as those whose tokens are limited but not
    counted."""
    body, settings = request.body, key.settings
    if request.method != "POST" or request.kept_id is not None:
        client.usage_counter = None  # the usage in a kept answer was counted when it was made
    has_budget = settings.tokens_per_day is not None or settings.tokens_per_minute is not None
    if has_budget and request.method == "POST" and route_of(request.path) is None:
        meant = similar(request.path, ROUTES)
        perhaps = f"; did you mean {meant}?" if meant else "."
        raise RequestError(
            f"The gateway does not know the route {request.path:.200}. The API key {settings.name} has a token limit "
            f"and may use only known routes{perhaps}", status=404, code="not_found",
        )  # fmt: skip
    if has_budget and (body.is_background or (request.method == "POST" and "uncounted" in request.traits)):
        raise RequestError(
            f"The API key {settings.name} has a token limit. Tokens of batches, background responses and /generate are "
            "not counted, so these need a key without one.", status=403, code="not_allowed",
        )  # fmt: skip
    if settings.models is not None and body.has_model_in_capitals:
        raise RequestError(
            f"The API key {settings.name} is for some models only. Its bodies must have model in small letters, and at "
            f"most {MAX_COLONS} colons.", param="model",
        )  # fmt: skip
    if body.is_resumed and request.path == "/v1/responses":
        raise RequestError(
            "resume would give a response an id of another key's.", param="resume", status=403, code="not_allowed"
        )
    if body.is_json and settings.priority is not None and "priority" in request.traits:
        body = body.having(priority=settings.priority)
    if body.streams and not body.wants_usage and "usage" in request.traits:
        body = body.having(stream_options={"include_usage": True})
        client.hides_usage = True
    return replace(request, body=body)
