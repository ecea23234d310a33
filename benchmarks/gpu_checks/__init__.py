"""The parts of `benchmarks/gpu_check.py`: each yields rows (what, unit, measured) as they are found."""
