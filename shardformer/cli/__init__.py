"""The commands of `python -m shardformer`: their words, their tables, their messages."""
