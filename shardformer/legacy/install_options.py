"""What `install()` was told, for xmap to read."""

strict: bool = False
