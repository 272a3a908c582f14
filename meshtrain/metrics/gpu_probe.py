"""A probe of each GPU: matrix products of a known size, now and then between two steps, which cost
about 5 ms on an H100. Its time reveals a throttled GPU even where FSDP's waits hide how long each
rank computes."""

import torch

EVERY = 200  # steps: at steps of a quarter of a second a ten-thousandth of the time
# The first of these steps: between two of the stragglers' looks (straggler.py), so that by the next
# look the GPU of each rank has done it.
FIRST = 10
SIZE = 4096  # of the matrices, which take 96 MiB while the probe runs
PRODUCTS = 20  # one after the other

Events = tuple[torch.cuda.Event, torch.cuda.Event]  # recorded before and after the products


class GpuProbe:
    """Starts a probe every `EVERY` steps, without waiting for it."""

    def __init__(self, device: torch.device, *, active: bool) -> None:
        """`active`: whether there are other ranks to compare with. A CPU is never probed."""
        self._device = device
        self._active = active and device.type == "cuda"
        self._running: list[Events] = []
        # Only GPUs of the same model are compared.
        self.model = torch.cuda.get_device_name(device) if self._active else ""

    def begin_step(self, step: int) -> None:
        """Puts a probe into the GPU's queue, if one is due, before anything else of this step."""
        if self._active and step % EVERY == FIRST:
            self._running.append(self._start())

    def _start(self) -> Events:
        # Between two steps no activations exist, so the allocator has this memory to spare, and
        # gets it back at once.
        generator = torch.Generator(self._device).manual_seed(0)  # no other random numbers change
        shape, dtype = (2, SIZE, SIZE), torch.bfloat16
        # Random numbers, because zeros need less power.
        a, b = torch.randn(shape, generator=generator, dtype=dtype, device=self._device)
        product = torch.empty_like(a)

        # The first product may have to load its kernel, which must not count.
        torch.mm(a, b, out=product)
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(PRODUCTS):
            torch.mm(a, b, out=product)
        end.record()
        return start, end

    def pop(self) -> list[float]:
        """The seconds of the probes that the GPU has finished since the last call."""
        seconds = []
        running = []
        for start, end in self._running:
            if end.query():
                seconds.append(start.elapsed_time(end) / 1000)
            else:
                running.append((start, end))
        self._running = running
        return seconds
