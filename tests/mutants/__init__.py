"""Mutants: one-line mistakes in the product that its tests must notice. `python -m tests.mutants` tries them."""
