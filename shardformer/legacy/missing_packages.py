"""The packages that scripts of xmap's era import, with the line that installs a missing one."""

import ast
import importlib.util
from collections.abc import Iterator

from shardformer.legacy.lost_names import FLAX_MODELS, flax_model

_UNDER_THEIR_NAMES = """
cloudpickle datasets einops fabric fastapi flask flax ftfy func_timeout lm_dataformat ml_collections pathy ray torch
tqdm transformers uvicorn wandb zstandard
"""
# By imported name, what pip installs.
PACKAGES = {name: name for name in _UNDER_THEIR_NAMES.split()} | {
    "google.cloud": "google-cloud-storage",
    "lm_eval": "'lm_eval<0.4'",  # the scripts use lm_eval.base
    "smart_open": "'smart_open[gcs]'",
}
# What else to know about one.
REMARKS = {
    "ray": "it starts the processes of a pod; a script without it, such as device_train.py, trains on one machine",
    "smart_open": "it reads gs:// paths with your Google account",
    "wandb": "WANDB_MODE=disabled runs it without an account",
}


def package_of(name: str) -> str | None:
    """Returns the imported name of the table that a dotted name belongs to."""
    parts = name.split(".")
    return next((start for end in (1, 2) if (start := ".".join(parts[:end])) in PACKAGES), None)


def advice(name: str) -> str:
    """Returns how to install a package of the table, or what replaces a Flax model; "" for any other name."""
    if flax_model(name) is not None:
        return FLAX_MODELS
    package = package_of(name)
    if package is None:
        return ""
    remark = f" ({REMARKS[package]})" if package in REMARKS else ""
    return f"pip install {PACKAGES[package]}{remark}"


def missing_imports(source: bytes | str) -> Iterator[tuple[int, str]]:
    """Yields the line and the package of each import of a package of the table that is not installed."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            names = [node.module] if node.module and not node.level else []
        elif isinstance(node, ast.Import):
            names = [imported.name for imported in node.names]
        else:
            continue
        for package in map(package_of, names):
            if package is not None and _is_missing(package):
                yield node.lineno, package


def _is_missing(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is None
    except ModuleNotFoundError:  # the package around it
        return True
