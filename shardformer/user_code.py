"""The functions of a user's FILE.py:NAME. Only a start names them: no stored file can have code run."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardformer.errors import UsageError, forbid_exit
from shardformer.files import expand_home


def import_function(key: str, name: str, takes: str) -> Callable[..., Any]:
    """Imports the function of KEY=FILE.py:NAME; `takes` ends the message if there is no such file."""
    file, _, function = name.rpartition(":")
    path = Path(expand_home(file))
    if not path.is_file():
        raise UsageError(f"{key}={name}: {path} is not a file; {takes}")
    try:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        with forbid_exit("the file"):
            spec.loader.exec_module(module)
        result = getattr(module, function)
    except Exception as error:  # a file may raise anything
        raise UsageError(f"{key}={name} cannot be imported: {str(error) or type(error).__name__}") from None
    if not callable(result):
        raise UsageError(f"{key}={name} is a {type(result).__name__}; name a function")
    return result
