"""The objectives of a run: around the language model, or a task of the user. README.md follows a batch."""
