"""Media in, placeholders and rows out. `pictures`, `sounds` and `videos` decode and check media. `processor` makes the
tower's input of each medium, and puts placeholder tokens into the prompt. `tower` computes the rows. torch,
transformers, Pillow and soundfile are imported where a model needs them.
"""
