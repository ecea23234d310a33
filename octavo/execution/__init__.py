"""One step on one device: the plan becomes a `StepBatch` of arrays, the model runs on it, tokens come back."""
