"""What becomes of the vectors that a model has pooled: `vectors` finishes them as a request wants them, `scores`
compares them.
"""
