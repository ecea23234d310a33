"""Tool calls in the texts that models write: `tool_formats` has the formats as data, `format_parser` and `forced_calls`
read calls, `call_spelling` writes them for grammars, `format_detection` finds the format of a model.
"""
