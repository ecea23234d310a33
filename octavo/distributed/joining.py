"""A node's requests to join node 0. It retries while node 0 cannot be reached, and gives up if it does not fit."""

import logging
import socket
import time
from collections.abc import Callable

import msgspec

from octavo.distributed.connection import HandshakeError, receive_message, show_address
from octavo.distributed.messages import Answer, Joined
from octavo.errors import ConfigError, LoadError

logger = logging.getLogger(__name__)

_RETRY_S, _REFUSED_RETRY_S = 0.25, 1.0
_NOTICE_S = 5.0  # then a node that cannot join logs it, and gives up if another node has its place

_decode_answer = msgspec.msgpack.Decoder(Answer).decode


def join(name: str, address: tuple[str, int], ask: Callable[[float | None], Answer], timeout_s: float | None) -> Joined:
    """Call `ask` until the answer is `Joined`, and return the answer. `ask` gets the deadline for an answer, and raises
    like `receive_answer`. Raises `ConfigError` if the node called `name` is refused, and `LoadError` after
    `timeout_s`."""
    begin = time.monotonic()
    deadline = None if timeout_s is None else begin + timeout_s
    refused_since: float | None = None
    has_said = False
    while True:
        try:
            answer = ask(deadline)
        except HandshakeError as error:
            raise ConfigError(f"{name} cannot join: {show_address(address)} {error}.") from None
        except (OSError, EOFError) as error:
            now, why = time.monotonic(), getattr(error, "strerror", None) or str(error) or "it has hung up"
            where = f"{name} cannot join node 0 at {show_address(address)}: {why}"
            if deadline is not None and now > deadline:
                raise LoadError(f"{where}. Given up after {timeout_s:g} s.") from None
            if not has_said and now > begin + _NOTICE_S:
                logger.error("%s; it goes on trying", where)
                has_said = True
            time.sleep(_RETRY_S)
            continue
        if isinstance(answer, Joined):
            return answer
        refused_since = refused_since or time.monotonic()
        if not answer.may_pass or time.monotonic() > refused_since + _NOTICE_S:
            raise ConfigError(f"{name} cannot join node 0 at {show_address(address)}: {answer.reason}.")
        time.sleep(_REFUSED_RETRY_S)


def receive_answer(connection: socket.socket, deadline: float | None) -> Answer:
    """Return node 0's answer to a `Join`. Raises `OSError` and `EOFError` while there is no node 0, and
    `HandshakeError` if something else is in its place."""
    left_s = 1e6 if deadline is None else max(1.0, deadline - time.monotonic())
    data = receive_message(connection, left_s)
    try:
        answer: Answer = _decode_answer(data)
        return answer
    except msgspec.MsgspecError:
        raise HandshakeError("answers what no node would") from None
