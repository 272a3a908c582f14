"""`meshtrain explain`: why a job has failed, found in its logs with rules that are data."""
