"""The machine: chips and their limits, and huge pages."""
