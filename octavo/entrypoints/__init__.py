"""The ways in: `LLM` (`llm`), the command line (`cli`), the HTTP server (`http`) and the page at /ui (`ui`).

`http` bounds and routes requests; `openai`, `responses`, `anthropic`, `pooling`, `audio` and `batch` are one API each;
`chat` is what those with conversations have in common.
"""
