"""The task of training/README.md, as it stands there."""

import re
from pathlib import Path

import shardformer
from shardformer.logs.metrics_file import read_metrics

PAGE = Path(shardformer.__file__).parent / "training" / "README.md"


def test_task_of_the_page_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source, *_ = re.findall(r"```python\n(.*?)```", PAGE.read_text().partition("## A task of your own")[2], re.DOTALL)
    exec(compile(source, str(PAGE), "exec"), {"__name__": "page"})
    losses = read_metrics(tmp_path / "checkpoints" / "squares")["loss"]
    assert losses[-1] < losses[0] / 10
