"""What holds for all tests."""

from hypothesis import settings

# Machines are noisy: how long an example takes says nothing.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
