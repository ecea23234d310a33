"""Where tokens live: the block pool with its prefix index, the per-sequence block tables, and the host swap tier.

Only block *numbers* are handled here. The memory behind them belongs to `octavo.execution`, which carries out the
copies that a `StepPlan` lists.
"""
