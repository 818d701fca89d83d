"""The names that NumPy has lost: with the results of NumPy 1.19 to 1.26, in --check, and in --migrate.

record_numpy_names.py wrote the recorded names and results.
"""

import json
import warnings
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from shardformer.legacy import removed_names
from shardformer.legacy.install import installed
from shardformer.legacy.removed_uses import find_removed_uses
from tests.legacy.migrated_code import migrated
from tests.legacy.record_numpy_names import EXPRESSIONS, canonical, results

RECORDED = json.loads((Path(__file__).parent / "goldens" / "numpy_names.json").read_text())
ROWS = {name for name in removed_names.PROVIDERS | removed_names.NOT_COVERED if name.startswith("numpy.")}
PUBLIC = {f"{module}.{name}" for module, names in RECORDED["names"].items() for name in names.split()}


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_a_removed_name_gives_its_old_result(expression):
    with pytest.raises(AttributeError):
        results(expression)
    with installed():
        assert results(expression) == RECORDED["results"][expression]


def test_a_migrated_name_gives_its_old_result(tmp_path, monkeypatch):
    sources = "\n".join(f"result_{number} = ({text})" for number, text in enumerate(EXPRESSIONS))
    found = migrated(tmp_path, f"import numpy as np\n{sources}\n")
    assert found.undecided == []
    assert found.helpers == {"legacy_numpy_functions"}
    home = Path(removed_names.__file__).parent
    (tmp_path / "legacy_numpy_functions.py").write_text((home / "numpy_functions.py").read_text())
    monkeypatch.syspath_prepend(tmp_path)
    namespace: dict = {}
    exec(found.migrated, namespace)
    for number, expression in enumerate(EXPRESSIONS):
        value = namespace[f"result_{number}"]
        assert canonical(value) == RECORDED["results"][expression]


def test_every_row_was_public_and_every_lost_name_has_a_row():
    assert ROWS <= PUBLIC
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lost = {name for name in PUBLIC if name.count(".") == 1 and not hasattr(np, name.removeprefix("numpy."))}
    assert lost - ROWS == set()
    assert len(lost) > 100


@pytest.mark.parametrize(
    ("source", "name", "status", "today"),
    [
        ("import numpy as np\nx.astype(np.float)", "numpy.float", "covered", "float"),
        ("from numpy import product", "numpy.product", "covered", "numpy.prod"),
        ("import numpy\nnumpy.fv(1, 2)", "numpy.fv", "not covered", "numpy_financial, a package of its own"),
        ("import numpy as np\nnp.math.pi", "numpy.math", "covered", "math"),
    ],
)
def test_check_lists_a_removed_name(source, name, status, today):
    assert [use[1:] for use in find_removed_uses(source)] == [(name, status, today)]


def test_living_names_are_not_reported():
    source = "import numpy as np\nnp.bool_, np.float64, np.isin, np.random.randint(3), np.linalg.norm, np.bool, np.char"
    assert find_removed_uses(source) == []
    assert find_removed_uses("import jax.numpy as np\nnp.float_, np.linalg.norm") == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import numpy as np\nx.astype(np.float)", "import numpy as np\nx.astype(float)"),
        ("import numpy as np\ndef f(float): return np.float", "import numpy as np\nimport builtins\n"
         "def f(float): return builtins.float"),
        ("import numpy as np\nnp.math.sqrt(np.product(s))", "import numpy as np\nimport math\nmath.sqrt(np.prod(s))"),
        ("from numpy import product, sum\nproduct(s)", "from numpy import sum\nfrom numpy import prod as product\n"
         "product(s)"),
        ("import numpy as np\nnp.in1d(a, b, invert=True)", "import numpy as np\nnp.isin(a, b, invert=True).ravel()"),
        ("import numpy as np\nf(-np.NINF, np.Inf)", "import numpy as np\nf(-(-np.inf), np.inf)"),
    ],
)  # fmt: skip
def test_migrate_writes_todays_name(tmp_path, source, expected):
    found = migrated(tmp_path, source)
    assert found.migrated.strip() == expected
    assert found.undecided == []


def test_jax_numpy_in1d_flattens_as_it_did():
    with installed():
        found = jnp.in1d(jnp.array([[1, 2], [3, 4]]), jnp.array([2, 3]))
    assert found.tolist() == [False, True, True, False]  # so the source of jax 0.4.13
