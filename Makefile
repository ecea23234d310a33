# What the scripts do, by name.
.PHONY: serve test check gpu-check

serve:
	scripts/serve

test:
	scripts/test

check:
	.ci/run

# On a machine with a GPU: kernel tests, parity, benchmarks, and gpu-check-results/page.md.
gpu-check:
	scripts/gpu-check
