"""Media in, placeholders and rows out: `pictures` and `sounds` decode and check, `processor` makes of each what a tower
reads and of a prompt the tokens that stand for it, `tower` computes the rows. torch, transformers, Pillow and soundfile
are imported where a model needs them.
"""
