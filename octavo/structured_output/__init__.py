"""Structured output: grammars made from requests, tried out, and followed token by token."""
