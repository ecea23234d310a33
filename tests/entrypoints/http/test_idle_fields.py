"""A field of a body is read by the server, or the docs say that it changes no answer."""

from __future__ import annotations

import importlib
import pkgutil
import re
import typing
from collections.abc import Iterator
from pathlib import Path

import octavo
from octavo import entrypoints
from octavo.entrypoints.http.body_fields import RequestBody

# Fields that are read by their names, as keys.
BY_NAME = {
    "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structures", "triggers", "text_1", "text_2",
    "data_1", "data_2",
}  # fmt: skip
# Fields of blocks and tools, of which docs/apis.md and docs/structured_output.md say that they change no answer.
IDLE = {"cache_control", "caller", "citations", "eager_input_streaming", "toolset_name", "disable_fallback"}


def bodies(kind: type[RequestBody] = RequestBody) -> Iterator[type[RequestBody]]:
    for one in kind.__subclasses__():
        yield one
        yield from bodies(one)


def has_one_value(annotation: object) -> bool:
    """Whether a field takes only null and one other value, which asks for nothing."""
    if typing.get_origin(annotation) is typing.Literal:
        return len(set(typing.get_args(annotation)) - {None}) <= 1
    parts = [one for one in typing.get_args(annotation) if one is not type(None)]
    return len(parts) == 1 and has_one_value(parts[0])


def test_no_field_is_accepted_in_vain_and_in_silence() -> None:
    for module in pkgutil.walk_packages(entrypoints.__path__, "octavo.entrypoints."):
        if ".cli" not in module.name:
            importlib.import_module(module.name)
    source = Path(octavo.__file__).parent
    texts = [path.read_text(encoding="utf-8") for path in source.rglob("*.py")]
    read = {name for text in texts for name in re.findall(r"(?<=[\w)\]])\.(\w+)", text)}
    found = set()
    for body in bodies():
        for name in body.__annotations__.keys() & body.model_fields.keys():
            field = body.model_fields[name]
            says_so = any(
                text in (field.description or "") for text in ("without effect", "does not change the answer")
            )
            if not ({name, name.rstrip("_")} & read or name in BY_NAME or says_so or has_one_value(field.annotation)):
                found.add(name)
    assert found == IDLE
    docs = "".join(
        (source.parent / f"docs/{name}.md").read_text(encoding="utf-8") for name in ("apis", "structured_output")
    )
    assert [name for name in sorted(IDLE) if f"`{name}`" not in docs] == []
