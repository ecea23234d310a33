"""Media in, placeholders and rows out: `pictures` decodes and checks, `processor` makes of a picture what a tower reads
and of a prompt the tokens that stand for it, `tower` computes the rows. torch, transformers and Pillow are imported
where a model needs them.
"""
