"""A job's processes: how they join, agree, exchange small values, are asked to stop, and leave."""
