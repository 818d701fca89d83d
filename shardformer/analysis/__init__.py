"""Look before you pay: what a compiled step sends over the wire."""
