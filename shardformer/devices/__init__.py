"""The machine: chips, options of their compilers, and compiled programs."""
