"""Attention over a context that is split over `cp`: the order of the tokens, a ring, and a gather. Shard view."""
