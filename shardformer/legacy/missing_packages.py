"""The packages that scripts of xmap's era import, with the line that installs a missing one."""

import ast
import importlib.util
import pkgutil
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
# What else to know about one; package_stand_ins has what runs without it.
REMARKS = {
    "google.cloud": "without it, gs://BUCKET/ is the folder BUCKET of the working directory",
    "lm_eval": "or `convert` the checkpoint and run `harness`",
    "ray": "without it, remote functions run here; actors need it and a pod, device_train.py and `harness` do not",
    "smart_open": "without it, gs://BUCKET/ is the folder BUCKET of the working directory",
    "wandb": "without it, nothing is logged",
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
            if package is not None and is_missing(package):
                yield node.lineno, package


def is_missing(package: str) -> bool:
    """Returns True if a package is not installed."""
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:  # the package around it
        return True
    # Python imports a folder without code as a package too, such as the folder `wandb` in which wandb records its runs.
    return spec is None or (spec.origin is None and not any(pkgutil.iter_modules(spec.submodule_search_locations)))
