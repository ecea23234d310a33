"""The CUDA backend: `octavo.ops.Ops` in Triton, one module a family of kernels.

Kernels see tensors that are on one device already; nothing here copies between host and device or waits for a stream,
so that every operation can be captured into a CUDA graph. With `TRITON_INTERPRET=1` all of it runs on the CPU, which is
how it is tested without a GPU.
"""
