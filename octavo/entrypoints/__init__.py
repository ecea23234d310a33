"""The interfaces of Octavo: `LLM` (`llm`), the command line (`cli`), the HTTP server (`http`) and the page at /ui
(`ui`).

`http` limits and routes requests. `openai`, `responses`, `anthropic`, `pooling`, `audio` and `batch` are one API each.
`chat` has the common parts of APIs with conversations.
"""
