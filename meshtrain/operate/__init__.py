"""The doctor's module path in the first edition, kept for compatibility."""
