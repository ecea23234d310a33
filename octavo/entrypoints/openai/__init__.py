"""OpenAI's chat completions, completions and models, and vLLM's routes of the same kind: one module a route group.

`request_bodies` and `response_bodies` have the bodies, `generation_job` the common part of the generating routes.
`api_server` and `cli_args` are import paths of vLLM, with the names of `vllm_compat`.
"""
