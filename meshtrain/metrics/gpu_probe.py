"""A probe of each GPU: matrix products of a known size, now and then between two steps, which cost
about 5 ms on an H100. Its time reveals a throttled GPU even where FSDP's waits hide how long each
rank computes."""

import torch

SIZE = 4096  # of the matrices, which take 96 MiB
PRODUCTS = 20  # one after the other


class GpuProbe:
    """Starts a probe every `every` steps (0: never), without waiting for it; on a CPU there is
    none."""

    def __init__(self, every: int, device: torch.device) -> None:
        self._every = every if device.type == "cuda" else 0
        self._running: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.model = ""  # of the GPU: only GPUs of the same model are compared
        if self._every:
            self.model = torch.cuda.get_device_name(device)
            # zeros need less power; no other random numbers change
            random = torch.Generator(device).manual_seed(0)
            a_b = torch.randn(2, SIZE, SIZE, generator=random, dtype=torch.bfloat16, device=device)
            self._a, self._b, self._product = *a_b, torch.empty_like(a_b[0])

    def begin_step(self, step: int) -> None:
        """Puts a probe into the GPU's queue, if one is due, before anything else of this step."""
        if not self._every or step % self._every != 0:
            return
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(PRODUCTS):
            torch.mm(self._a, self._b, out=self._product)
        end.record()
        self._running.append((start, end))

    def pop(self) -> list[float]:
        """The seconds of the probes that the GPU has finished since the last call."""
        done = [pair for pair in self._running if pair[1].query()]
        self._running = [pair for pair in self._running if pair not in done]
        return [start.elapsed_time(end) / 1000 for start, end in done]
