"""Modules under the names that vLLM has for its second generation. Octavo has one, and nothing lives here."""
