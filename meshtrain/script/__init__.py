"""A run in a script of one's own: `Run`, with which the loop stays the user's. A layout, a global
batch and checkpoints are those of a YAML's run, and most parts are the same."""
