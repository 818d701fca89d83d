"""Conversations: records to the text of a chat template, to token ids and the loss mask."""
