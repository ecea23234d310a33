"""`current_platform`, under the name of vLLM's module: what this process computes on."""

from octavo.hardware import why_not_cuda

__all__ = ["current_platform"]


class _Platform:
    """This machine. Octavo computes on CPUs and on NVIDIA GPUs."""

    @property
    def device_type(self) -> str:
        return "cuda" if why_not_cuda() is None else "cpu"

    @property
    def device_name(self) -> str:
        return self.device_type

    def is_cpu(self) -> bool:
        return self.device_type == "cpu"

    def is_cuda(self) -> bool:
        return self.device_type == "cuda"

    is_cuda_alike = is_cuda

    def is_rocm(self) -> bool:
        return False

    is_xpu = is_tpu = is_rocm


current_platform = _Platform()
