"""The table of families in shardformer/convert/README.md, written from their recorded models.

python -m tests.convert.family_table
"""

import json
from pathlib import Path

import shardformer.convert
from shardformer.config import FIELDS, Config
from shardformer.convert import hf_settings
from shardformer.convert.families import FAMILIES
from shardformer.convert.families.llama_cpp import GGUF
from tests.convert.conftest import GOLDENS
from tests.convert.hf_models import FOLDER, MODELS

PAGE = Path(shardformer.convert.__file__).with_name("README.md")
HEADING = "## Every family\n"
COLUMNS = ("`model_type`", "keys that differ from Llama's", "GGUF", "recorded")
# Keys that the size of a model sets, and those whose letters or numbers do.
SIZES = {"vocab", "seq", "layers", "d_model", "heads", "kv_heads", "d_ff", "head_dim", "norm_eps", "rotary_theta"}
PATTERNS = {"window_pattern", "expert_pattern", "rotary_scaling"}


def make_table() -> str:
    """Returns the table, with a row for each family."""
    llama = hf_settings.read_config(FOLDER / "llama")[1]
    published = json.loads((GOLDENS / "published_configs.json").read_text())
    accepted = [entry["config"]["model_type"] for entry in published if "rejected" not in entry]
    found: dict[str, dict[str, None]] = {name: {} for name in sorted(FAMILIES)}
    for model in MODELS:
        theirs = json.loads((FOLDER / model / "config.json").read_text())
        found[theirs["model_type"]] |= dict.fromkeys(
            find_differences(hf_settings.read_config(FOLDER / model)[1], llama)
        )
    rows = [
        (f"`{name}`", f"`{' '.join(keys)}`" if keys else "", "yes" if name in GGUF else "", accepted.count(name) or "")
        for name, keys in found.items()
    ]
    table = [COLUMNS, ["---"] * len(COLUMNS), *rows]
    return "".join("|" + "|".join(f" {cell} " if cell else " " for cell in row) + "|\n" for row in table)


def find_differences(config: Config, other: Config) -> list[str]:
    """Returns the keys whose values differ, with the value of a choice."""
    result = []
    for key in FIELDS:
        value = config.get(key)
        if key in SIZES or value == other.get(key) or (key in PATTERNS and not value):
            continue
        is_choice = isinstance(value, str | bool) and key not in PATTERNS
        result.append(f"{key}={str(value).lower()}" if is_choice else key)
    return result


def replace_table(page: str) -> str:
    """Returns the page with the table of today; it is the last part of the page."""
    before, heading, after = page.partition(HEADING)
    assert heading, f"{PAGE.name} lacks the heading {HEADING}"
    return before + heading + after.partition(f"| {COLUMNS[0]}")[0] + make_table()


if __name__ == "__main__":
    PAGE.write_text(replace_table(PAGE.read_text()))
