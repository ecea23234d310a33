"""The paths and the header of the key that clients of Azure's OpenAI service use. The server and the gateway read them
as those of OpenAI's API. The model is the one that the body names; the deployment's name and `api-version` are not
read."""

from __future__ import annotations

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
    path = scope["path"][len(root) :]
    if not path.startswith(_PREFIX):
        return
    rest = path.removeprefix(_PREFIX).removeprefix("v1/")
    found = _DEPLOYMENT.fullmatch(rest)
    scope["path"] = f"{root}/v1/{rest if found is None else found[1]}"
    scope["raw_path"] = quote(scope["path"]).encode()
    scope["headers"] = [(b"x-api-key" if name == b"api-key" else name, value) for name, value in scope["headers"]]
