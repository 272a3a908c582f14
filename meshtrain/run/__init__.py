"""What a run prints, writes and keeps: its folder, its metrics, its checkpoints, its exit
status."""
