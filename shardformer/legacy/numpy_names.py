"""The names that NumPy has lost since 1.19, as tables: code of that time uses them with jax and without.

The tables of all libraries are in removed_names.py and lost_names.py.
"""

_FUNCTIONS = "shardformer.legacy.numpy_functions"

# Python's types and modules, under their names.
_PYTHON = {name: f"builtins:{name}" for name in ("complex", "float", "int", "object", "str")} | {
    name: name for name in ("math", "os", "sys", "warnings")
}
_TYPES = {
    "bool8": "bool_", "bytes0": "bytes_", "cfloat": "complex128", "clongfloat": "clongdouble",
    "complex_": "complex128", "float_": "float64", "int0": "intp", "longcomplex": "clongdouble",
    "longfloat": "longdouble", "object0": "object_", "singlecomplex": "complex64", "str0": "str_", "string_": "bytes_",
    "uint0": "uintp", "unicode_": "str_", "void0": "void",
}  # fmt: skip
_ALIASES = {
    "Inf": "inf", "Infinity": "inf", "NAN": "nan", "NaN": "nan", "PINF": "inf", "alltrue": "all",
    "cumproduct": "cumprod", "infty": "inf", "mat": "asmatrix", "product": "prod", "round_": "round",
    "row_stack": "vstack", "sometrue": "any", "trapz": "trapezoid",
}  # fmt: skip
_MOVED = {
    **{
        name: f"numpy.exceptions:{name}"
        for name in ("AxisError", "ComplexWarning", "ModuleDeprecationWarning", "RankWarning", "TooHardError",
                     "VisibleDeprecationWarning")
    },
    "DataSource": "numpy.lib.npyio:DataSource",
    "byte_bounds": "numpy.lib.array_utils:byte_bounds",
    "chararray": "numpy.char:chararray",
    "compare_chararrays": "numpy.char:compare_chararrays",
    "format_parser": "numpy.rec:format_parser",
    "loads": "pickle:loads",
    "safe_eval": "ast:literal_eval",
    "unicode": "builtins:str",
}  # fmt: skip
NUMPY_RENAMED = {
    f"numpy.{name}": provider
    for name, provider in {
        **_PYTHON,
        **{name: f"numpy:{today}" for name, today in (_TYPES | _ALIASES).items()},
        **_MOVED,
    }.items()
}

NUMPY_REWRITTEN = {
    f"numpy.{name}": (f"{_FUNCTIONS}:{name}", today)
    for name, today in {
        "NINF": "-numpy.inf",
        "NZERO": "-0.0",
        "PZERO": "0.0",
        "alen": "len(x)",
        "asfarray": "numpy.asarray(x, dtype=float)",
        "asscalar": "x.item()",
        "cast": "numpy.asarray(x).astype(dtype)",
        "deprecate": "warnings.warn",
        "disp": "print",
        "find_common_type": "numpy.promote_types or numpy.result_type",
        "in1d": "numpy.isin(x, y).ravel()",
        "issctype": "issubclass(x, numpy.generic)",
        "issubclass_": "issubclass",
        "issubsctype": "numpy.issubdtype",
        "maximum_sctype": "the type itself",
        "msort": "numpy.sort(x, axis=0)",
        "obj2sctype": "numpy.dtype(x).type",
        "sctype2char": "numpy.dtype(x).char",
        "sctypes": "the types themselves",
        "typeDict": "numpy.dtype(x).type",
    }.items()
}

_OWN = "nothing: it was NumPy's own"
_LOST = {
    "numpy_financial, a package of its own": "fv ipmt irr mirr nper npv pmt ppmt pv rate",
    "numpy.errstate or numpy.seterr": "geterrobj seterrobj ERR_CALL ERR_DEFAULT ERR_IGNORE ERR_LOG ERR_PRINT "
    "ERR_RAISE ERR_WARN FPE_DIVIDEBYZERO FPE_INVALID FPE_OVERFLOW FPE_UNDERFLOW SHIFT_DIVIDEBYZERO SHIFT_INVALID "
    "SHIFT_OVERFLOW SHIFT_UNDERFLOW",
    "numpy.genfromtxt": "mafromtxt ndfromtxt recfromcsv recfromtxt",
    "numpy.set_printoptions": "set_string_function",
    "numpy.finfo": "MachAr",
    "numpy.dtype(x).itemsize": "nbytes",
    "x.T.copy()": "fastCopyAndTranspose",
    "warnings.warn": "deprecate_with_doc",
    "inspect.getsource": "source",
    "help": "lookfor who",
    "pytest": "Tester",
    "nothing: code for Python 3 needs no compatibility": "compat",
    "64": "MAXDIMS",
    _OWN: "ALLOW_THREADS BUFSIZE CLIP FLOATING_POINT_SUPPORT MAY_SHARE_BOUNDS MAY_SHARE_EXACT RAISE "
    "UFUNC_BUFSIZE_DEFAULT UFUNC_PYVALS_NAME WRAP add_docstring add_newdoc add_newdoc_ufunc get_array_wrap "
    "kernel_version numarray oldnumeric sctypeNA set_numeric_ops tracemalloc_domain typeNA use_hugepage",
}
NUMPY_LOST = {f"numpy.{name}": today for today, group in _LOST.items() for name in group.split()}
