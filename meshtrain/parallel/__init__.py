"""How one plain model is spread over a mesh: DDP, FSDP, HSDP, tensor parallelism, and what they are made of."""
