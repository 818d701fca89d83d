"""Mixtures of experts as the feed-forwards of layers: all that is only theirs. README.md follows a token."""
