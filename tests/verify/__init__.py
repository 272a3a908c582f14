"""`meshtrain verify`: what it says of runs that differ, and of those that do not."""
