"""Triton kernels, one module a family: what `octavo.ops.cuda` is made of.

Nothing here waits for a stream and grids depend on shapes only, so that every operation can be captured into a CUDA
graph. With `TRITON_INTERPRET=1` all of it runs on the CPU, which is how it is tested without a GPU.
"""
