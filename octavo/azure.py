"""The paths and the header of the key that clients of Azure's OpenAI service use. The server and the gateway read them
as those of OpenAI's API. The model is the one that the body names; the deployment's name and `api-version` are not
read."""

import re
from typing import Any
from urllib.parse import quote

_PREFIX = "/openai/"
# The name of a deployment may have slashes, as the names of models on the hub do.
_DEPLOYMENT = re.compile(r"deployments/.+?/(chat/completions|completions|embeddings|audio/[a-z]+|images/[a-z]+)")


def read_as_openai(scope: Any, root_path: str = "") -> None:
    """Give a request for one of Azure's paths, perhaps below `root_path`, OpenAI's path, and the key in a
    header that is read."""
    root = root_path if root_path and scope["path"].startswith(root_path + "/") else ""
    raw_root = quote(root).encode()
    path, raw_path = scope["path"][len(root) :], scope["raw_path"].removeprefix(raw_root)
    if not path.startswith(_PREFIX) or not raw_path.startswith(_PREFIX.encode()):
        return
    rest, raw_rest = path.removeprefix(_PREFIX), raw_path.removeprefix(_PREFIX.encode())
    if (found := _DEPLOYMENT.fullmatch(rest.removeprefix("v1/"))) is not None:
        rest, raw_rest = found[1], found[1].encode()
    scope["path"] = f"{root}/v1/{rest.removeprefix('v1/')}"
    scope["raw_path"] = raw_root + b"/v1/" + raw_rest.removeprefix(b"v1/")  # as the client has encoded it
    scope["headers"] = [(b"x-api-key" if name == b"api-key" else name, value) for name, value in scope["headers"]]
