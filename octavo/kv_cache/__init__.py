"""Where tokens live: groups of layers, block pools with their prefix index, block tables, and the host swap tier.

This package handles block *numbers* only. `octavo.execution` owns the memory and carries out the copies that a
`StepPlan` lists.
"""
