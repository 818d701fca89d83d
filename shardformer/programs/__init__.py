"""Compiled programs, kept for the next start: by JAX's cache in one process, by files of our own in several."""

from shardformer.programs.compilation_cache import keep_compiled_programs
from shardformer.programs.kept_program import jit

__all__ = ["jit", "keep_compiled_programs"]
