"""`meshtrain explain`: why a job has failed, by its logs, with rules that are data."""
