"""Runs sharded programs without devices: all devices of a mesh in lockstep, in NumPy, with floats in float64.

`run(function, *arguments)` returns the results, what the program sent, and where replicas differ.
"""

from shardformer.exact.interpreter import Disagreement, Run, Sent, run, run_jaxpr
from shardformer.exact.repairs import Repair, explain, find_repair
from shardformer.exact.source_lines import find_error_line

__all__ = ["Disagreement", "Repair", "Run", "Sent", "explain", "find_error_line", "find_repair", "run", "run_jaxpr"]
