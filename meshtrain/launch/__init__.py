"""`meshtrain launch`: a script for sbatch, for one config, checked before anything waits in a queue."""
