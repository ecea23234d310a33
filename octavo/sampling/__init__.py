"""Turns logits into tokens: `processors` changes logits as requests ask, `sampler` chooses tokens, `random` makes
random numbers."""
