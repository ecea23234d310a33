"""The Triton kernels of `octavo.ops.cuda`, one module for each family of kernels.

Nothing here waits for a stream, and grids depend on shapes only, so every operation can be captured into a CUDA graph.
With `TRITON_INTERPRET=1` all kernels run on the CPU; tests without a GPU use this.
"""
