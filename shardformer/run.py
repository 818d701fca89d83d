"""A run folder: its configuration, its vocabulary, its checkpoints."""

import dataclasses
import json
from pathlib import Path
from typing import NamedTuple

import jax

from shardformer import checkpoint, config, data, mesh
from shardformer.config import Config
from shardformer.data import Corpus, Vocabulary
from shardformer.errors import RunError, UsageError
from shardformer.files import replacing
from shardformer.model import Model
from shardformer.report import records
from shardformer.train import Trainer, TrainState


class Best(NamedTuple):
    """The checkpoint with the lowest validation loss so far."""

    step: int = 0
    val_loss: float = float("inf")


@dataclasses.dataclass(frozen=True)
class Run:
    config: Config
    vocabulary: Vocabulary
    fingerprint: str  # of the corpus

    @property
    def out(self) -> Path:
        return Path(self.config.out)

    @staticmethod
    def create(config: Config, corpus: Corpus) -> "Run":
        """A new run on this corpus; nothing is written yet."""
        vocabulary = Vocabulary.of(corpus.train)
        vocab = config.vocab or len(vocabulary)
        if vocab < len(vocabulary):
            raise UsageError(
                f"vocab={vocab} is less than the {len(vocabulary)} characters of {corpus.name}; "
                f"try vocab={len(vocabulary)}, or vocab=0 for as many as there are"
            )
        return Run(config.replace(vocab=vocab, data=corpus.name), vocabulary, corpus.fingerprint)

    @staticmethod
    def open(folder: Path, overrides: dict | None = None) -> "Run":
        """The run in a folder, with what a resume may change."""
        folder, overrides = Path(folder), overrides or {}
        if (folder / "progress.json").exists():
            raise UsageError(f"{folder} is a checkpoint; name its run, {folder.parent}, with step= where that is asked")
        if "out" in overrides and Path(overrides["out"]).resolve() != folder.resolve():
            raise UsageError(f"out cannot change on resume: copy {folder} and resume the copy")
        settings = config.resumed(config.read(folder), overrides | {"out": str(folder)})
        return Run(settings, *Vocabulary.read(folder))

    def on(self, corpus: Corpus) -> "Run":
        """The run with its text where it lies now."""
        return dataclasses.replace(self, config=self.config.replace(data=corpus.name))

    def refuse_to_overwrite(self) -> None:
        if self.out.exists() and not self.out.is_dir():
            raise UsageError(f"out={self.out} is a file; name a folder")
        if (self.out / "config.json").exists() or checkpoint.latest(self.out):
            raise UsageError(
                f"{self.out} already holds a run; go on with `train --resume {self.out}`, "
                "or give the new one another out="
            )

    def write_documents(self) -> None:
        """Process 0 writes them, where all processes must see them: checkpoints will be read there by all."""
        if jax.process_index() == 0:
            self.out.mkdir(parents=True, exist_ok=True)
            for name, text in self._documents().items():
                with replacing(self.out / name) as temporary:
                    temporary.write_text(text)
        mesh.wait_for_all("run folder")
        visible = str((self.out / "config.json").exists())
        mesh.check_same_everywhere(f"out={self.out}, which must lie on a disk that all share,", visible)

    def check_same_start(self) -> None:
        """The same run from the same step on every process."""
        start = checkpoint.latest(self.out)
        settings = dataclasses.asdict(self.config.replace(data="", out=""))
        same = json.dumps([settings, self.fingerprint, start and start.name])
        mesh.check_same_everywhere("the text, the configuration or the newest checkpoint", same)

    def check_corpus(self, corpus: Corpus) -> None:
        data.check_same_data(self.out, source=corpus.name, fingerprint=corpus.fingerprint)

    def has_records(self) -> bool:
        return records.metrics_path(self.out).exists() and bool(records.read(self.out)["step"])

    def save(self, state: TrainState, step: int, best: Best) -> None:
        documents = self._documents() | {"progress.json": json.dumps({"step": step, "best": best._asdict()})}
        checkpoint.save(self.out, step, state, documents)
        if jax.process_index() == 0:
            checkpoint.prune(self.out, self.config.keep, {best.step})

    def restore(self, trainer: Trainer) -> tuple[TrainState, Best]:
        """The newest checkpoint's state and the best so far, or a new state where there is none yet."""
        newest = checkpoint.latest(self.out)
        if newest is None:
            return trainer.init(), Best()
        try:
            return checkpoint.restore(newest, trainer.abstract), _best(newest)
        except RunError as error:
            raise RunError(f"{error}; without {newest} the run goes on from the checkpoint before it") from None

    def restore_params(self, model: Model, step: int = 0):
        """(step, parameters) of one checkpoint: the best by validation unless `step` says otherwise."""
        newest = checkpoint.latest(self.out)
        if newest is None:
            raise UsageError(f"{self.out} has no checkpoint yet")
        known = checkpoint.steps(self.out)
        step = step or _best(newest).step or known[-1]
        if step not in known:
            raise UsageError(f"{self.out} has no checkpoint of step {step}; there are {', '.join(map(str, known))}")
        like = {"params": model.abstract}
        state = checkpoint.restore(checkpoint.folder(self.out, step), like, without=("step", "optimizer"))
        return step, state["params"]

    def _documents(self) -> dict[str, str]:
        vocabulary = self.vocabulary.document(source=self.config.data, fingerprint=self.fingerprint)
        return {"config.json": self.config.to_json(), "vocabulary.json": vocabulary}


def _best(folder: Path) -> Best:
    try:
        best = json.loads(checkpoint.document(folder, "progress.json"))["best"]
        return Best(int(best["step"]), float(best["val_loss"]))
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{folder / 'progress.json'} is damaged ({type(error).__name__}: {error})") from None
