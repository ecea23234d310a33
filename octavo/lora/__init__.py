"""Low-rank adapters (Hu et al. 2021) for one set of base weights: reading their files, and where their factors are: on
disk, in host memory, or in pages of device memory.

Callers name adapters; inside the engine, an adapter's identity is a hash of its files' contents.
"""
