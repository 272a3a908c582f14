"""A job's processes: how they join, agree, exchange words, are asked to stop, and leave."""
