# What the scripts do, by name.
.PHONY: serve test check gpu-check

serve:
	scripts/serve

test:
	scripts/test

check:
	.ci/run

# On a machine with a GPU: kernel tests, parity, benchmarks, and the table of docs/gpu.md.
gpu-check:
	scripts/gpu-check --out gpu-check.md
