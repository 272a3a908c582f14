"""The commands of the console script `meshtrain`: what looks at a job from outside."""
