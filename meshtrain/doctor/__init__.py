"""The doctor: is everything in place for this job on these nodes, and if not, what is wrong and how
to fix it."""
