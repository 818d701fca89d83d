"""Measurements of a step, its costs, checkpoints and generation, and the references they are compared with."""
