"""What msgspec says about a body or a file, in the words that users know, for the gateway and Ollama's routes."""

import re

import msgspec

_AT = r"(?: - at `\$\.?(?P<at>[^`]*)`)?"
_WRONG = re.compile(
    rf"Expected `(?P<kinds>[^`]+)`(?:, got `(?P<got>[^`]+)`|(?P<bound> (?:of length )?[<>]=? \S+)){_AT}"
)
_MISSING = re.compile(rf"Object missing required field `(?P<name>[^`]+)`{_AT}")
_NOUNS = {
    "array": "a list", "object": "an object", "str": "a string", "int": "an integer", "float": "a number",
    "bool": "true or false", "null": "null",
}  # fmt: skip


def plain_reason(error: msgspec.DecodeError) -> str:
    """Return what is wrong, without a full stop: "messages should be a list, got a string"."""
    text = str(error)
    if found := _MISSING.fullmatch(text):
        return f"{found['at']}.{found['name']} is required".removeprefix("None").removeprefix(".")
    if found := _WRONG.fullmatch(text):
        kinds = found["kinds"].split(" | ")
        wanted = " or ".join(_NOUNS.get(kind, kind) for kind in kinds if kind != "null" or len(kinds) == 1)
        got = found["bound"] or f", got {_NOUNS.get(found['got'], found['got'])}"
        return f"{found['at'] or 'the body'} should be {wanted}{got}"
    return text
