"""The code cells of a Jupyter notebook as one Python source, without shell and magic lines."""

import ast
import json
import re
from typing import NamedTuple

_NOT_PYTHON = re.compile(r"^(\s*)(?:!.*|%+[A-Za-z].*|\?.*|[\w.]+\?+)$")  # a shell or magic line, or a question for help
_ASSIGNED = re.compile(r"^(\s*[\w, ]+=\s*)(?:!|%+[A-Za-z]).*$")
_ABOUT_PYTHON = ("%%time", "%%timeit", "%%capture", "%%prun")  # cell magics whose cells hold Python


class Notebook(NamedTuple):
    source: str
    places: list[str]  # of each line: "code cell 3, line 2"
    broken: list[tuple[str, str]]  # the places of cells that do not parse, and why


def read(content: bytes) -> Notebook:
    """Raises a ValueError if the content is not a notebook."""
    source, places, broken = [], [], []
    for number, text in enumerate(_code_cells(content), 1):
        lines = text.splitlines()
        try:
            lines = lines if _parses(lines) else _python(lines)
            ast.parse("\n".join(lines))
        except SyntaxError as error:
            broken.append((f"code cell {number}, line {error.lineno or 1}", error.msg))
            continue
        source += lines
        places += [f"code cell {number}, line {line}" for line in range(1, len(lines) + 1)]
    return Notebook("\n".join(source), places, broken)


def _code_cells(content: bytes) -> list[str]:
    try:
        cells = json.loads(content)["cells"]
        sources = [cell["source"] for cell in cells if cell["cell_type"] == "code"]
        return ["".join(source) for source in sources]  # one string, or a list of lines
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"not a notebook of version 4 ({type(error).__name__}: {error})") from None


def _parses(lines: list[str]) -> bool:
    try:
        ast.parse("\n".join(lines))
    except SyntaxError:
        return False
    return True


def _python(lines: list[str]) -> list[str]:
    """As many lines, so that places stay."""
    code = [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if code and code[0].startswith("%%") and not code[0].startswith(_ABOUT_PYTHON):
        return [""] * len(lines)
    indent = code[0][: len(code[0]) - len(code[0].lstrip())] if code else ""
    lines = [line.removeprefix(indent) for line in lines]  # as IPython does
    result: list[str] = []
    continues = False  # a shell or magic line that ends in a backslash
    for line in lines:
        python = "" if continues else _ASSIGNED.sub(r"\1None", _NOT_PYTHON.sub(r"\1pass", line))
        continues = line.endswith("\\") and (continues or python != line)
        result.append(python)
    return result
