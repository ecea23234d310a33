"""The errors that users meet. Each message is one line that says what was asked, what was found and what to do.

Anything else that escapes is a bug of Octavo's own and keeps its traceback.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class OctavoError(Exception):
    """Base of every error that is the user's to act on; command lines print it without a traceback."""


class ConfigError(OctavoError, ValueError):
    """A flag, or a combination of flags, that cannot be honoured."""


class LoadError(OctavoError):
    """A model, tokenizer or checkpoint that cannot be found, read or held in memory."""


class RequestError(OctavoError, ValueError):
    """A request that is refused at the door; it fails alone.

    `param` names the field at fault, `status` is the HTTP status and `code` the OpenAI error code, where there is one.
    After `retry_after_s` the same request may be taken.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        status: int = 400,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.param = param
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s


_OF_A_PROMPT = ("prompt", "prompt_embeds", "multi_modal_data", "multi_modal_uuids")


@contextmanager
def naming_prompt(field: str, index: int = 0, count: int = 1) -> Iterator[None]:
    """Whatever is wrong with a prompt is said of the `field` that it comes from, and of several there are with its
    `index`, from 0. What is wrong with all of them alike stays as it is."""
    try:
        yield
    except RequestError as error:
        if count > 1 and (error.param in _OF_A_PROMPT or error.code == "context_length_exceeded"):
            error.args = (f"{field}[{index}]: {error}",)
        if error.param == "prompt":
            error.param = field
        raise


class DeviceMemoryError(OctavoError):
    """A step did not find the device memory that it needs. None of it was computed; the engine goes on."""


class EngineDeadError(OctavoError):
    """The engine process has ended; the request cannot be answered by this server."""


class EngineRestartingError(EngineDeadError):
    """The engine process has ended and is being started again; try in a moment."""


class EngineStoppingError(EngineDeadError):
    """The server was told to stop before the request was answered."""
