"""Logits to tokens: `processors` change logits as requests ask, `sampler` chooses, `random` has the numbers."""
