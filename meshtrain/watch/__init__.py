"""A page on which runs can be watched while they train, served from their folders: `meshtrain watch
runs/X`."""
