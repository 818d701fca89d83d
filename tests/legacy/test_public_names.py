"""The tables of removed names against a recorded list: every public name of jax 0.2.9 to 0.10.2.

record_public_names.py wrote the list from the sources of 49 releases.
"""

import importlib
import json
import pkgutil
import warnings
from pathlib import Path

import pytest

from shardformer.legacy import removed_names
from shardformer.legacy.removed_uses import find_removed_uses

RECORDED = json.loads((Path(__file__).parent / "goldens" / "public_names.json").read_text())["names"]
PUBLIC = {*RECORDED, *(f"{module}.{name}" for module, names in RECORDED.items() for name in names.split())}
# Rows for names outside of the list, with the reason.
NOT_RECORDED = {
    "jax.config.disable_omnistaging": "a method of the object jax.config",
    "jax.config.enable_omnistaging": "a method of the object jax.config",
    "jax.experimental.general_map": "removed before 0.2.9; in 0.1.77",
    "jax.experimental.optix": "removed before 0.2.9; in 0.1.77",
    "jax.experimental.gda_serialization.serialization": "the list leaves modules of this name out; in 0.3.25",
    "jax.lib.xla_extension.DeviceArray": "defined in jaxlib, whose sources the list lacks",
    "jax.lib.xla_extension.PyTreeDef": "defined in jaxlib, whose sources the list lacks",
    "jax.experimental.maps._PositionalSemantics": "never public; dm-haiku 0.0.6 to 0.0.9 set it",
    "jax.experimental.maps._positional_semantics": "never public; dm-haiku 0.0.6 to 0.0.9 set it",
    **dict.fromkeys((f"jax.ad.{name}" for name in removed_names.AD_NAMES), "jax.ad was jax.interpreters.ad"),
    "jax.ad.linearize": "jax.ad was jax.interpreters.ad",
    "jax.ad.zeros_like_p": "jax.ad was jax.interpreters.ad",
    "jax._src.util.prod": "never public; all who used it imported it from jax's private module",
    "jax.test_util._default_tolerance": "never public; the tests of jax_md change it",
    "jax.lax._reduce_window_sum": "never public; the tests of neural-tangents call it",
    "jax.lax.pgather": "never public; all who used it imported it from jax's private module",
}


def lives(module, name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            importlib.import_module(module)
        except ImportError as error:
            if not (error.name or "").startswith("jax"):
                return True  # it exists, and needs another library
        try:
            pkgutil.resolve_name(f"{module}.{name}")
        except (AttributeError, ImportError):
            return False
    return True


@pytest.mark.parametrize("table", ["RENAMED", "REWRITTEN", "NOT_COVERED", "CHANGED"])
def test_every_row_was_public_in_some_release(table):
    rows = {name for name in getattr(removed_names, table) if name.startswith("jax.")}
    assert rows - PUBLIC - set(NOT_RECORDED) == set()


def test_every_exception_is_a_row():
    rows = removed_names.PROVIDERS.keys() | removed_names.NOT_COVERED.keys()
    assert set(NOT_RECORDED) <= rows - PUBLIC


def test_check_knows_every_public_name_that_is_gone():
    unknown, gone = [], 0
    for module, names in RECORDED.items():
        for name in names.split():
            if lives(module, name):
                continue
            gone += 1
            uses = find_removed_uses(f"from {module} import {name}")
            advice = uses[0].advice if uses else ""
            if not advice or advice.endswith(f"not in jax {importlib.import_module('jax').__version__}"):
                unknown.append(f"{module}.{name}")
    assert unknown == [], unknown
    assert gone > 1_000


def test_the_list_has_names_of_every_era():
    for name in ("jax.tree_multimap", "jax.experimental.maps.xmap", "jax.core.NamedShape", "jax.device_put_replicated"):
        assert name in PUBLIC
    assert "jax.no_such_name" not in PUBLIC
    assert len(PUBLIC) > 5_000
