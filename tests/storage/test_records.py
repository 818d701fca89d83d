"""A run's small files in a bucket: which of its objects they are."""

import pytest

from shardformer.storage import local_copy


@pytest.mark.parametrize("name", ["metrics.csv", "tensorboard/events.out.tfevents.1.v2", "profile/a/b.json.gz"])
def test_records(name):
    assert local_copy._is_record(name)


@pytest.mark.parametrize(
    "name", ["step_00000040/manifest.json", ".lock", "tensorboard/.x", "../x", "a/../../x", "/etc/passwd", "a//b", ""]
)
def test_other_objects(name):
    assert not local_copy._is_record(name)
