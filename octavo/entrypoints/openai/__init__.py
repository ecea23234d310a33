"""The OpenAI-compatible server: one module a route group, `app` puts them together, `server` runs the process."""
