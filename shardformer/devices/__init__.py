"""The machine: chips and options of their compilers, compiled programs, and the processes that train together."""
