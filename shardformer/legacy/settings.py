"""Settings."""

strict: bool = False
