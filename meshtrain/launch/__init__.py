"""`meshtrain launch`: a job of one config for SLURM, Kubernetes or SkyPilot, checked before it waits."""
