"""Quantised weights: matrices stored as codes and scales. README.md follows a matrix."""
