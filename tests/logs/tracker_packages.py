"""Stand-ins for the packages of trackers, which check each call against the recorded signature of the real function.

`python -m tests.logs.tracker_packages wandb mlflow aim` records the signatures of the installed packages.
"""

import importlib
import importlib.metadata
import inspect
import json
import sys
import types
from pathlib import Path

RECORD = Path(__file__).with_name("tracker_signatures.json")
CALLED = {
    "wandb": ("login", "init", "Run.log", "Run.finish"),
    "mlflow": ("start_run", "log_params", "log_metrics", "end_run"),
    "aim": ("Run.__init__", "Run.__setitem__", "Run.track", "Run.close"),
}


class StandIn:
    """A package, or a run of it. Each function in the record notes its call in `calls`: (name, arguments by name).

    A run has the identity that it continues, or `run_1`.
    """

    def __init__(self, package: str, calls: list, owner: str = "", identity: str = ""):
        self._package, self._calls, self._owner = package, calls, owner
        self.id = self.hash = identity
        self.info = types.SimpleNamespace(run_id=identity)

    def __getattr__(self, name):
        path = "Run.__init__" if name == "Run" else self._owner + name
        signature = json.loads(RECORD.read_text())[self._package]["functions"].get(path)
        if name.startswith("_") or signature is None:
            raise AttributeError(f"{self._package} has no recorded {path}")
        return lambda *args, **keys: self._call(path, signature, *args, **keys)

    def __setitem__(self, key, value):
        self._calls.append(("config", {key: value}))

    def _call(self, path: str, signature: str, *args, **keys):
        scope: dict = {}
        exec(f"def function{signature}: return dict(locals())", scope)  # raises TypeError for other arguments
        given = scope["function"](*((None,) if "." in path else ()), *args, **keys)
        given = {key: value for key, value in given.items() if value is not None}
        self._calls.append((path, given))
        identity = next((given[key] for key in ("id", "run_id", "run_hash") if key in given), "run_1")
        return StandIn(self._package, self._calls, "Run.", identity)


def read_signature(package: str, path: str) -> str:
    """Returns the parameters of an installed package's function; None stands for every default."""
    function = importlib.import_module(package)
    for name in path.split("."):
        function = getattr(function, name)
    empty = inspect.Parameter.empty
    parameters = [
        parameter.replace(annotation=empty, default=empty if parameter.default is empty else None)
        for parameter in inspect.signature(function).parameters.values()
    ]
    return str(inspect.Signature(parameters))


def record(package: str) -> dict:
    """Returns the signatures of an installed package's functions that `trackers` calls, with its version."""
    distribution = importlib.metadata.packages_distributions()[package][0]
    signatures = {path: read_signature(package, path) for path in CALLED[package]}
    return {"version": importlib.metadata.version(distribution), "functions": signatures}


if __name__ == "__main__":
    recorded = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    RECORD.write_text(json.dumps(recorded | {name: record(name) for name in sys.argv[1:]}, indent=1) + "\n")
