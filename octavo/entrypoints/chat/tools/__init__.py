"""Tool calls in models' texts: `tool_formats` has the formats as data, `format_parser` and `forced_calls` read calls,
`call_spelling` writes them for grammars, `format_detection` finds a model's format.
"""
