"""The layers that models are built of. A layer owns packed weights, computes through `Ops` and returns its output; the
block decides when the output is added to the residual stream. Each module has a layer and its description.
"""
