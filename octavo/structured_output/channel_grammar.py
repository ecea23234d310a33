"""The grammar of an answer of Harmony's messages, as gpt-oss writes them, in which there may be calls. Its marks are
special tokens, so no text contains them. `call_grammars` adds the rules of the arguments."""

from collections.abc import Mapping

from octavo.structured_output.lark import escaped

_MARKS = ("<|start|>", "<|end|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|call|>")
_NAMESPACE = "functions."


def has_marks(special_tokens: Mapping[str, int]) -> bool:
    """Return whether a vocabulary has Harmony's marks."""
    return special_tokens.keys() >= set(_MARKS)


def channel_rules(indices: Mapping[str, int], special_tokens: Mapping[str, int]) -> list[str]:
    """Return the rules of an answer after `<|start|>assistant`: messages with any texts in any channels, and calls. The
    rule `rest{i}` is of the arguments of the function `i` and `<|call|>`. Other recipients than functions get any
    text, as a browser does."""
    start, end, channel, constrain, message, call = (f"<[{special_tokens[mark]}]>" for mark in _MARKS)
    # The recipient may stand before the channel or after it.
    roles, heads, lines = list[str](), list[str](), list[str]()
    for name, i in indices.items():
        to = f"to={escaped(_NAMESPACE + name)}"
        lines += [f"ROLE{i}: / ?{to}/", f"HEAD{i}: /(commentary|analysis) {to}( (json)?)?/"]
        roles.append(f"ROLE{i} {channel} KIND json {message} rest{i}")
        heads.append(f"HEAD{i} json {message} rest{i}")
    return [
        "start: PLAIN after_text | begun",
        f"begun: ({' | '.join(roles)}) more | {channel} ({' | '.join(heads)}) more"
        f" | {channel} HEAD json {message} TEXT after_text"
        f" | ({channel} OTHER | OTHER_ROLE {channel} HEAD) json {message} TEXT {call} more",
        f"after_text: ({end} more)?",
        f'more: ({start} "assistant" begun)?',
        f"json: ({constrain} JSON)?",
        # No text before a mark addresses a function in another way.
        r"PLAIN: /(.|\n)*/ & ~/\s*to=(.|\n)*/",
        r"HEAD: /(.|\n)*/ & ~/(.|\n)*to=(.|\n)*/",
        rf"OTHER: /[a-z]* to=[^ ](.|\n)*/ & ~/[a-z]* to={escaped(_NAMESPACE)}(.|\n)*/",
        rf"OTHER_ROLE: / ?to=[^ ](.|\n)*/ & ~/ ?to={escaped(_NAMESPACE)}(.|\n)*/",
        "KIND: /(commentary|analysis)( (json)?)?/",
        "JSON: / ?json ?/",
        r"TEXT: /(.|\n)*/",
        *lines,
    ]
