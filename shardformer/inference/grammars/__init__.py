"""Texts of a given form: grammars of bytes, JSON schemas, and the tokens that such a text may go on with."""
