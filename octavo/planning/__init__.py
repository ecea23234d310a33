"""What fits where and how fast (`octavo plan`), and what this machine can do (`octavo doctor`, `octavo collect-env`).

Sizes come from the engine's own statements: a model's constructor, the specifications of its caches, the packers'
layouts. Times come from steps that are measured here, or from the models of devices in `octavo.ops.triton.schedule`.
"""
