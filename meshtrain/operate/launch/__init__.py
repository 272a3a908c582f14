"""`meshtrain launch`: a script for sbatch, for one config, checked before anything waits in a queue.

command      the page that everything is on
checks       does the config fit these nodes, and can its files be read and written
request      what is asked of SLURM, and whether that can be right
script       PURE  the text of a script of tools/slurm with this job's values in it
"""
