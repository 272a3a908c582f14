"""One run as a witness: the same training undisturbed on one process, and through twelve
disturbances."""
