"""The server process, whatever the API: `server` starts and stops it, `uvicorn_server` reads the sockets,
`auth_and_limits` checks keys, queue and bodies, `router` finds the handler, `error_responses` and `streaming` answer.
"""
