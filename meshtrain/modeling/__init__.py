"""From the YAML's model to a module with its first values, and what it costs."""
