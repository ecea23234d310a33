"""Downloads models and tokenizers from the Hugging Face hub into its usual cache, and only the files that are needed.

HF_HOME, HF_TOKEN, HF_HUB_OFFLINE, HF_ENDPOINT and TRANSFORMERS_CACHE keep their meaning. An unreachable hub is no error
if the cache has the model. `huggingface_hub` is imported only here, when a hub id is first used.
"""

import os
import re
from collections.abc import Callable

from octavo.errors import LoadError

# Endings of configurations, tokenizers, chat templates and shard indexes.
_SMALL_SUFFIXES = (
    ".json",
    ".jinja",
    ".tiktoken",
    "tokenizer.model",
    "tiktoken.model",
    "merges.txt",
    "vocab.txt",
    ".py",
)
# In a sentence-transformers repository: settings and weights of the modules after the network.
_MODULE_FILE = re.compile(r"\d+_[A-Za-z]+/(config\.json|model\.safetensors|pytorch_model\.bin)")
# LoRA adapters that a model's repository has for images and speech.
_ADAPTER_FILE = re.compile(r"((speech|vision)-lora/)?adapter_(config\.json|model\.safetensors)")
_TIMEOUT_S = 10.0
Fetch = Callable[[str, str, list[str]], None]  # called with the repository, its commit and the names of files


def download(
    repo: str, revision: str | None, download_dir: str | None, pick: Callable[[list[str]], list[str]] | None = None,
    fetch: Fetch | None = None,
) -> str:  # fmt: skip
    """Download the repository's small files, and the files that `pick` chooses from its top-level file names. Return
    their folder. `fetch` may first put some of them into the cache. Raises `LoadError`."""
    from huggingface_hub import HfApi, errors, snapshot_download

    at = f" at revision {revision}" if revision else ""
    try:
        try:
            # Not list_repo_files: without a network it retries for half a minute before it raises an error.
            info = HfApi().model_info(repo, revision=revision, timeout=_TIMEOUT_S)
            paths = [s.rfilename for s in info.siblings or []]
            names = [path for path in paths if "/" not in path]
        except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError):
            raise
        except Exception as unreachable:
            return _find_in_cache(repo, revision, download_dir, unreachable)
        wanted = [n for n in names if n.endswith(_SMALL_SUFFIXES) or n.startswith("tokenizer.model.v")]
        wanted += [path for path in paths if path.startswith("additional_chat_templates/")]
        wanted += [path for path in paths if _MODULE_FILE.fullmatch(path) or _ADAPTER_FILE.fullmatch(path)]
        wanted += pick(names) if pick else []
        if not wanted:
            raise LoadError(
                f"{repo}{at} on the Hugging Face hub holds no model: its files are {', '.join(names[:5])} ..."
            )
        if fetch is not None and info.sha is not None:
            fetch(repo, info.sha, wanted)
        return snapshot_download(repo, revision=revision, cache_dir=_cache(download_dir), allow_patterns=wanted)
    except LoadError:
        raise
    except errors.GatedRepoError:
        raise LoadError(
            f"{repo} on the Hugging Face hub is gated: accept its terms on its page and set HF_TOKEN to a token of "
            "that account."
        ) from None
    except errors.RevisionNotFoundError:
        raise LoadError(f"{repo} on the Hugging Face hub has no revision {revision!r}.") from None
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        raise LoadError(
            f"{repo} is neither a folder or .gguf file here nor a model on the Hugging Face hub; check the name, and "
            "set HF_TOKEN if it is private."
        ) from None
    except Exception as e:  # failures of a network need no traceback
        raise LoadError(f"{repo}{at} could not be fetched from the Hugging Face hub: {_one_line(e)}.") from None


def _find_in_cache(repo: str, revision: str | None, download_dir: str | None, unreachable: Exception) -> str:
    """Return the folder of the repository in the cache if the hub cannot be reached. Raises `LoadError`."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        # One small file stands for the rest: the other files were chosen when they were fetched, and whoever reads them
        # checks them.
        return snapshot_download(
            repo, revision=revision, cache_dir=_cache(download_dir), local_files_only=True,
            allow_patterns=["config.json"],
        )  # fmt: skip
    except LocalEntryNotFoundError:
        raise LoadError(
            f"{repo} is not a folder or file here, is not in the Hugging Face cache, and the hub cannot be reached "
            f"({_one_line(unreachable)}); check the name, --download-dir and HF_HOME, or connect."
        ) from None


def _cache(download_dir: str | None) -> str | None:
    """Return the folder for downloaded models; None is the hub's own cache. The hub's library no longer reads
    TRANSFORMERS_CACHE, so it is read here."""
    return download_dir or os.environ.get("TRANSFORMERS_CACHE") or None


def _one_line(e: Exception) -> str:
    if type(e).__name__ == "OfflineModeIsEnabled":
        return "HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set"
    lines = str(e).strip().splitlines()
    return f"{type(e).__name__}: {lines[0].rstrip('.')}" if lines else type(e).__name__
