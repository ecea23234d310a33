"""Media in, placeholders and rows out. `picture_reader`, `sounds` and `videos` decode and check media.
`model_processor` makes the tower's input of each medium (transformers resizes pictures there), and puts placeholder
tokens into the prompt. `tower` computes the rows. torch, transformers, Pillow and soundfile are imported where a model
needs them.
"""
