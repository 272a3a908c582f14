"""`meshtrain verify`: whether each layout of a config, or of a script, computes what one process
does, and if not, where the first difference is and of what kind.

Each run is one that a user could start, with an observer inside (`recording.py`). One process goes
first, and its gradients and weights are files in which the ranks of every other run look up their
own parts (`compare.py`). Where one differs, `kinds.py` judges by all that is known of that step.
"""
