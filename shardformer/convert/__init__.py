"""Conversions between runs and the formats of others: Hugging Face's, PEFT's, GPT-J's shards, the seed's container."""
