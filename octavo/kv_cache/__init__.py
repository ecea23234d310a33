"""Where tokens live: groups of layers, block pools with their prefix index, block tables, and the host swap tier.

Only block *numbers* are handled here. The memory behind them belongs to `octavo.execution`, which carries out the
copies that a `StepPlan` lists.
"""
