"""Parallelism in the shard view: collectives, replicas and ZeRO, pipeline stages, microbatches, split contexts."""
