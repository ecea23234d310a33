"""Predicts which models fit a device and how fast they run (`octavo plan`), and reports on this machine (`octavo
doctor`, `octavo collect-env`).

Sizes come from the engine's own code: a model's constructor, the specifications of its caches, the layouts of packed
weights. Times come from steps measured on this machine, or from the device models in `octavo.ops.triton.schedule`.
"""
