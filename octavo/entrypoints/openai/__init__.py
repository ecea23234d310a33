"""OpenAI's chat completions, completions and models, and vLLM's routes of the same kind: one module a route group.

`request_bodies` and `response_bodies` have their bodies, `generation_job` what the generating routes do alike.
`api_server` and `cli_args` are import paths of vLLM's, with the names of `vllm_compat`.
"""
