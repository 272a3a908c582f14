"""Builds and initializes the model of a YAML file, and computes its costs."""
