"""What a run says, writes and keeps: its folder, its numbers, its checkpoints, its end."""
