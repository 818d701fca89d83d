"""transformers.generation_flax_utils and its sibling, which later releases have in transformers.generation."""

import importlib
import sys

sys.modules[__name__] = importlib.import_module(__name__.replace("generation_flax", "generation.flax"))
