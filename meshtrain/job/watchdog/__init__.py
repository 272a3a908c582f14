"""Hangs and lost ranks: a thread on every rank that notices them, and the diagnosis of which rank
caused them."""
