"""`meshtrain launch`: an sbatch script for one config, checked before the job waits in a queue."""
