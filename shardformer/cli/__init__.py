"""The commands of `python -m shardformer`: their arguments, tables and messages."""
