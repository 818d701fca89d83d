"""What a run trains: an objective around the language model, or a task of the user. README.md follows a batch."""
