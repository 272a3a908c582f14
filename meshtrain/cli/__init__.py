"""The commands of the console script `meshtrain`, which look at a job from outside."""
