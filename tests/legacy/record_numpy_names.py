"""Adds the running NumPy's names and results to goldens/numpy_names.json: `python tests/legacy/record_numpy_names.py`.

Run once under each old release, from 1.19 on; the results are those of the last release that could evaluate them.
"""

import json
import warnings
from pathlib import Path

import numpy as np

GOLDEN = Path(__file__).parent / "goldens" / "numpy_names.json"
MODULES = "numpy", "numpy.fft", "numpy.linalg", "numpy.ma", "numpy.random"
# Expressions of removed names, as --check's users wrote them.
EXPRESSIONS = """
np.int(2.7), np.float("1.5"), np.bool8(1), np.str(3), np.object, np.complex(1, 2), np.unicode(1)
np.float_(1.5), np.complex_(2), np.string_("a"), np.unicode_("b"), np.int0(4), np.uint0(4), np.singlecomplex(1)
np.Inf, np.Infinity, np.infty, np.PINF, np.NINF, np.NaN, np.NAN, np.PZERO, np.NZERO
np.product([[1, 2], [3, 4]], axis=0), np.cumproduct([1, 2, 3]), np.sometrue([0, 1]), np.alltrue([0, 1])
np.in1d([[1, 2], [3, 4]], [2, 3]), np.in1d([1, 2], [2], invert=True), np.in1d([1, 2], [2], assume_unique=True)
np.trapz([1, 2, 4]), np.trapz([1, 2, 4], dx=2), np.round_([1.25, 2.5], 1)
np.asfarray([1, 2]), np.asfarray([1, 2], dtype=np.int32), np.asfarray(np.ones(2, np.float32)).dtype
np.asfarray([1], dtype=np.float32), np.asscalar(np.array([3])), np.alen([[1], [2]]), np.alen(5)
np.msort([[3, 1], [2, 4]]), np.mat([[1, 2], [3, 4]]) * np.mat([[1], [1]]), np.safe_eval("[1, 'a']")
np.find_common_type([np.float32], [np.int64, np.float64]), np.find_common_type([np.int64, np.int32], [np.float32])
np.find_common_type([], [np.int32, np.float32]), np.find_common_type(["f4", "f4", "i4"], ["c8"])
np.find_common_type([np.int8], []), np.find_common_type([], [])
np.issctype(np.int32), np.issctype(1), np.issctype(np.dtype("f4")), np.issctype(list), np.issctype("f4")
np.issubclass_(np.int32, np.integer), np.issubclass_(3, int), np.issubsctype(np.ones(2), np.floating)
np.issubsctype("i4", np.floating), np.obj2sctype(np.ones(2)), np.obj2sctype("f4"), np.obj2sctype(1, int)
np.obj2sctype(float), np.sctype2char(np.float32), np.sctype2char(int), np.maximum_sctype(np.int8)
np.maximum_sctype(np.uint8), np.maximum_sctype(np.int32), np.maximum_sctype(str), np.cast["f4"]([1, 2])
np.cast[np.int32](2.7), [t.__name__ for t in np.sctypes["int"]], [t.__name__ for t in np.sctypes["others"]]
np.math.sqrt(4), np.typeDict["f4"], np.byte_bounds(np.zeros(2))[1] - np.byte_bounds(np.zeros(2))[0]
""".strip().splitlines()


def canonical(value):
    """Returns a value as JSON has it, without NumPy's changing texts."""
    if isinstance(value, (tuple, list)):
        return [canonical(each) for each in value]
    if isinstance(value, type):
        return value.__name__.rstrip("_")
    if isinstance(value, np.dtype):
        return value.str
    if isinstance(value, (np.ndarray, np.generic)):
        return [type(value).__name__.rstrip("_"), value.dtype.str, str(value.tolist())]
    return f"{type(value).__name__} {value}"


def results(expression):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return canonical(eval(expression, {"np": np}))


def public(module):
    home = np if module == "numpy" else getattr(np, module.rpartition(".")[2])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {name for name in {*dir(home), *getattr(home, "__all__", [])}
                if not name.startswith("_") and hasattr(home, name)}  # fmt: skip


def main():
    recorded = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {"versions": [], "names": {}, "results": {}}
    recorded["versions"].append(np.__version__)
    for module in MODULES:
        names = {*recorded["names"].get(module, "").split(), *public(module)}
        recorded["names"][module] = " ".join(sorted(names))
    for expression in EXPRESSIONS:
        try:
            recorded["results"][expression] = results(expression)
        except AttributeError as error:
            print(np.__version__, error)
    GOLDEN.write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    main()
