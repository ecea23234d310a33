"""Logits to tokens: `processors` change the logits of rows that ask for it, `sampler` chooses, `random` is the dice."""
