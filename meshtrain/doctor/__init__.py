"""The doctor: is everything in place for this job on these nodes, and if not, what is wrong and what mends it.

It is run where torchrun would be, with torchrun's own options, on every node: torchrun starts no worker while a node is
missing, so a check inside of the workers could never say who is. `command.py` has everything on a page.
"""
