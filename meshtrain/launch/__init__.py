"""`meshtrain launch`: a job for SLURM, Kubernetes or SkyPilot, checked before it is queued."""
