"""The machine: chips and their limits, huge pages, the cache of compiled programs."""
