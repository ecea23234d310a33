"""Where tokens live: groups of layers, block pools with their prefix index, block tables, the tier of the host,
and the tier on disk.

This package handles block *numbers*, and bytes only on their way to and from disk. `octavo.execution` owns the memory
and carries out the copies that a `StepPlan` lists.
"""
