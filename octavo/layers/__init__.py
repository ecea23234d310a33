"""What models are built of. A layer owns packed weights, computes through `Ops` and returns values; what is added to
the residual stream, and when, is the block's choice. A module holds a layer and the description that it is built from.
"""
