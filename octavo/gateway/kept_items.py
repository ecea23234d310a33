"""Finds the model of a request, and the replica that alone can answer because it keeps what the request is about."""

import re
from collections import OrderedDict
from typing import NamedTuple

from octavo.errors import RequestError, similar
from octavo.gateway.deployment import Deployment
from octavo.gateway.models import Models
from octavo.gateway.proxy_request import MODEL_HEADER, ROUTES, ProxyRequest, route_of
from octavo.gateway.replica import Replica

# Ids of things that a replica keeps, in an answer.
_CREATED = re.compile(
    rb'"(?:id|output_file_id|error_file_id)"\s*:\s*"((?:resp|conv|chatcmpl|file|batch)[-_][\w-]{1,100})"'
)
_ADMIN_PATHS = ("/usage", "/keys")
_HEAD_BYTES = 8192  # of an answer, which has the ids
_MAX_IDS = 65_536  # remembered ones


class Home(NamedTuple):
    """Who keeps a thing, and for which client's key."""

    model: str
    replica: Replica
    owner: str | None


class CreatedIds:
    """Which model's replica keeps a response, a conversation, a stored chat, a file or a batch, and for whose key. The
    oldest are forgotten first."""

    def __init__(self) -> None:
        self._homes: OrderedDict[str, Home] = OrderedDict()

    def add(self, created: str, model: str, replica: Replica, owner: str | None = None) -> None:
        """Note an id in an answer to `owner`. An id that is another one's stays so: answers repeat what clients
        write."""
        if created in self._homes and self._homes[created].owner != owner:
            return
        self._homes[created] = Home(model, replica, owner)
        self._homes.move_to_end(created)
        if len(self._homes) > _MAX_IDS:
            self._homes.popitem(last=False)

    def find(self, created: str) -> Home | None:
        return self._homes.get(created)


class KeptItems:
    """Remembers which replica has made what."""

    def __init__(self, models: Models) -> None:
        self._models, self._created = models, CreatedIds()

    def note_created(
        self, request: ProxyRequest, deployment: Deployment, replica: Replica, data: bytes, stream_id: str | None
    ) -> None:
        """Note what a replica keeps since its answer: the ids in `data`, the answer's beginning, or that of the stream
        which it goes on with."""
        if request.is_of_kept:
            ids = [one.decode() for one in _CREATED.findall(data[:_HEAD_BYTES])] if stream_id is None else [stream_id]
            for one in ids:
                self._created.add(one, deployment.name, replica, request.owner)

    def place(self, request: ProxyRequest) -> tuple[Deployment, Replica | None]:
        """Return the model, and the replica if only one can answer because it keeps what the request is about. Raises
        `RequestError`."""
        named, kept_id = request.model, request.kept_id or request.body.refers_to
        home = self._created.find(kept_id or "")
        if home is not None and home.owner != request.owner:
            raise RequestError(f"{kept_id} is not known here.", status=404, code="not_found")
        if home is not None and (named is None or home.model in self._models.find(named).answering_names):
            deployment = self._models.find(home.model)
            # By name: a server whose address left and came back is another `Replica`.
            name = None if deployment.base.entry.is_local else home.replica.name
            pinned = [one for one in deployment.replicas if one is home.replica or one.name == name]
            if not pinned:
                raise RequestError(
                    f"{kept_id} was kept by a replica of {home.model} that has stopped.", status=404, code="not_found"
                )
            return deployment, pinned[0]
        if named is not None:
            deployment = self._models.find(named)
            maker = None if home is None else self._models.names().get(home.model)
            if home is not None and maker is not None and deployment.router.load is maker.router.load:
                # Another model of the same servers, such as an adapter of the model.
                at = home.replica.upstream.address
                pinned = [one for one in deployment.replicas if one.upstream.address == at]
                return deployment, next(iter(pinned), None)
        elif len(self._models) == 1:
            deployment = next(iter(self._models))
        elif request.kept_id is not None:
            raise RequestError(
                f"{request.kept_id:.200} is not known here: the gateway remembers what was made through it since it "
                f"started. Name the model that keeps it in the header {MODEL_HEADER.decode()}.",
                status=404, code="not_found",
            )  # fmt: skip
        else:
            if request.path.startswith(_ADMIN_PATHS):
                raise RequestError(f"{request.path:.200} is a route of the admin port (--admin-port).", status=404)
            if route_of(request.path) is None:
                meant = similar(request.path, ROUTES)
                perhaps = f"; did you mean {meant}?" if meant else "."
                raise RequestError(
                    f"{request.path:.200} is no route that the gateway knows{perhaps} For "
                    f"another route of a server, name its model in the header {MODEL_HEADER.decode()}.",
                    status=404, code="not_found",
                )  # fmt: skip
            raise RequestError(
                f"{request.path:.200} names no model, and there are {len(self._models)}: give it as `model` in the "
                f"body, or in the header {MODEL_HEADER.decode()}.",
                param="model",
            )
        lists = request.method == "GET" and "lists" in request.traits
        if lists and request.usage_counter is not None:
            raise RequestError(f"{request.path} also lists items of other clients.", status=403, code="not_allowed")
        if lists and deployment.entry.may_be_several:
            raise RequestError(
                f"{request.path} lists what one server keeps, and {deployment.name} has several replicas: ask for one "
                "thing by its id."
            )
        return deployment, None
