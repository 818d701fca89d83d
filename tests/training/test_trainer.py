"""A Trainer that a user makes in Python, without a session and its data."""

import pytest

from shardformer.errors import UsageError
from shardformer.layout import mesh
from shardformer.training.trainer import Trainer
from tests import shared


def make_trainer(**keys) -> Trainer:
    config = shared.tiny(mesh="1x1", **keys)
    return Trainer(config, mesh.make(config))


def test_epochs_without_data_are_rejected():
    trainer = make_trainer(epochs=3.0)
    with pytest.raises(UsageError, match="epochs=3 counts rows of data, which a Trainer lacks; use Session, or steps="):
        trainer.init()


def test_steps_without_data_are_accepted():
    assert int(make_trainer(steps=20).init().step) == 0
