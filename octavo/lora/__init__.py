"""Adapters of low rank (Hu et al. 2021) beside one set of base weights: what their files say, and where their factors
are: on disk, in the host's memory, in pages of the device's.

An adapter is known by a hash of its files' contents everywhere but at the doors, where it has a name.
"""
