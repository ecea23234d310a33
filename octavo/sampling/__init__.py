"""Logits to tokens: `processors` change the logits of rows that ask for it, `sampler` chooses, `random` has the numbers."""
