"""The fake engine behind a real HTTP server, as the tests of the routes have it."""

from tests.entrypoints.conftest import address, engine, shared_engine

__all__ = ["address", "engine", "shared_engine"]
