"""Checkpoints of others: GPT-J's `shard_i/j.npz` folders to runs of ours and back; the seed's container, as it is."""
