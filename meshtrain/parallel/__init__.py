"""Distributes a plain model over a mesh: DDP, FSDP, HSDP, tensor parallelism, and their building
blocks."""
