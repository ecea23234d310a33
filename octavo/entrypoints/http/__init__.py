"""The server process, whatever the API: `server` and `uvicorn_server` start and stop it,
`auth_and_limits` checks keys, queue and bodies, `router` finds the handler, `error_responses` and `streaming` answer.
"""
