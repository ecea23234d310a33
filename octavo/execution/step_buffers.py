"""The memory of a runner's steps: staging buffers on the host, and the device's inputs that they are uploaded to."""

from functools import partial

from octavo.execution.device import Device
from octavo.execution.step_arrays import StepArrays, StepLayout, StepLimits
from octavo.execution.submitted_step import StagingBuffer
from octavo.ops import Array

# On a device that runs ahead two steps may be in flight while the host writes a third.
_NUM_STAGING_BUFFERS_AHEAD = 3


class StepBuffers:
    """The buffers for steps within `limits`. If the device shares the host's memory, staging buffer and inputs are
    the same."""

    def __init__(self, device: Device, limits: StepLimits) -> None:
        self._device, num_bytes = device, StepLayout(limits, limits.largest).num_bytes
        self.staging = [
            StagingBuffer(i, device.pinned([num_bytes], "uint8"), device.pinned([limits.largest.samples], "int64"))
            for i in range(_NUM_STAGING_BUFFERS_AHEAD if device.runs_ahead else 1)
        ]
        self._device_inputs = device.upload_target(self.staging[0].input_bytes)
        self._num_taken = 0

    def take(self) -> StagingBuffer:
        """Wait until the device no longer uses the next staging buffer, and return it."""
        staging = self.staging[self._num_taken % len(self.staging)]
        self._num_taken += 1
        if staging.free_event is not None:
            staging.free_event.wait()
        return staging

    def on_device(self, layout: StepLayout) -> StepArrays[Array]:
        """Return a step's arrays in the inputs of the device."""
        return layout.on_device(self._device_inputs, self._device.view)

    def upload(self, staging: StagingBuffer, num_bytes: int) -> None:
        """Append the upload of a staging buffer's inputs to the device's stream."""
        if self._device.shares_memory:
            return
        copy = partial(self._device.copy, staging.input_bytes[:num_bytes], self._device_inputs[:num_bytes])
        self._device.compute.run(copy, reads=[staging.input_bytes])
