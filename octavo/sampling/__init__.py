"""Logits to tokens: `processors` change logits where requests ask for it, `sampler` chooses, by the numbers of `random`."""
