"""The options of `install()`, which xmap reads."""

strict: bool = False
