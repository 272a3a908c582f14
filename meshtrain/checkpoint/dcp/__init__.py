"""Checkpoints of torch.distributed.checkpoint (DCP): read and written without their processes."""
