"""Many requests at once: an engine over slots of one KV cache, and an OpenAI-compatible server on it."""
