"""Fetches a hub model's large files piece by piece, for `octavo pull`.

An interrupted fetch continues where it stopped; the hub's own library no longer does this. A file comes into the cache
only if its SHA-256 is the hub's. `hub.download` then finds these files there.
"""

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from octavo.errors import LoadError
from octavo.loading.local_models import hub_cache

_PIECE_BYTES = 1 << 20
# Called with a file's name, its digest, its size, and how many bytes of it are here.
Report = Callable[[str, str, int, int], None]


def fetch_large_files(repo: str, revision: str, names: Sequence[str], report: Report) -> None:
    """Fetch the files whose SHA-256 the hub knows into the hub's cache. Raises `LoadError` for a file with other
    bytes."""
    from huggingface_hub import HfApi, hf_hub_url
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

    info = HfApi().model_info(repo, revision=revision, files_metadata=True)
    blobs = hub_cache() / f"models--{repo.replace('/', '--')}" / "blobs"
    for sibling in info.siblings or []:
        if sibling.rfilename not in names or sibling.lfs is None:
            continue
        path = blobs / sibling.lfs.sha256
        if not path.exists():
            blobs.mkdir(parents=True, exist_ok=True)
            url = hf_hub_url(repo, sibling.rfilename, revision=info.sha)
            with WeakFileLock(f"{path}.part.lock"):
                if not path.exists():  # another process may have fetched it meanwhile
                    _fetch(url, path, sibling.rfilename, sibling.lfs.size, report)
            Path(f"{path}.part.lock").unlink(missing_ok=True)
        report(sibling.rfilename, sibling.lfs.sha256, sibling.lfs.size, sibling.lfs.size)


def _fetch(url: str, path: Path, name: str, size: int, report: Report) -> None:
    from huggingface_hub import utils

    headers: dict[str, str] = utils.build_hf_headers() | {"Accept-Encoding": "identity"}  # type: ignore[attr-defined]

    part = Path(f"{path}.part")
    digest = hashlib.sha256()
    with open(part, "a+b") as file:
        file.seek(0)
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
        num_bytes = file.tell()
        if num_bytes < size:
            if num_bytes:
                headers["Range"] = f"bytes={num_bytes}-"
            session = utils.get_session()  # type: ignore[attr-defined]
            with session.stream("GET", url, headers=headers, follow_redirects=True, timeout=60) as response:
                utils.hf_raise_for_status(response)  # type: ignore[attr-defined]
                if num_bytes and response.status_code != 206:  # a server without ranges begins again
                    file.truncate(0)
                    num_bytes, digest = 0, hashlib.sha256()
                for piece in response.iter_raw():
                    file.write(piece)
                    digest.update(piece)
                    num_bytes += len(piece)
                    report(name, path.name, size, num_bytes)
    if num_bytes < size:
        raise LoadError(f"the hub sent {num_bytes} of the {size} bytes of {name}; pull again to go on from there.")
    if digest.hexdigest() != path.name:
        part.unlink()
        raise LoadError(
            f"{name} is not the file that the hub describes: SHA-256 {digest.hexdigest()}, expected {path.name}; "
            "pull again."
        )
    os.replace(part, path)
