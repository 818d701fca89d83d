"""Any number of processes restores the checkpoints of any other number, on any mesh."""

from pathlib import Path

import pytest

from tests import shared
from tests.checkpoint import group
from tests.launch import Forked, finished, free_port

pytestmark = pytest.mark.multiprocess

GROUP = ("-c", "from tests.checkpoint import group; group.main()")


def start(processes: int, out: Path, *what: str) -> list[Forked]:
    port = free_port()
    return [Forked(process, processes, port, out, *what, program=GROUP) for process in range(processes)]


def output(running: list[Forked]) -> list[str]:
    try:
        ends = [finished(process) for process in running]
    finally:
        for process in running:
            process.kill()
    assert [status for status, *_ in ends] == [0] * len(running), ends
    return [out for _, out, _ in ends]


@pytest.fixture(scope="module")
def restored(tmp_path_factory):
    """Groups of one (this), two and four processes save side by side, and each restores what all have saved."""
    out = tmp_path_factory.mktemp("groups")
    two = start(2, out, "save_on_every_mesh", "restore_all", "restore_within_bounds", "fail_as_one")
    four = start(4, out, "save_on_every_mesh", "restore_all")
    group.save_on_every_mesh(out)
    return out, {1: [], 2: output(two), 4: output(four)}


def test_every_group_restores_every_groups_checkpoint(restored, capsys):
    out, said = restored
    for text in (*said[2], *said[4]):
        assert "restored 12" in text
    group.restore_all(out)
    assert "restored 12" in capsys.readouterr().out


def test_the_matrix_holds_every_pair():
    cells = [(p, a, q, group.target(q, p, a)) for p in group.COUNTS for q in group.COUNTS for a in shared.MESHES]
    for one, other in ((0, 2), (0, 1), (2, 3), (1, 3), (0, 3), (1, 2)):
        sides = [{cell[axis] for cell in cells} for axis in (one, other)]
        assert len({(cell[one], cell[other]) for cell in cells}) == len(sides[0]) * len(sides[1])


def test_zero_changes_between_saving_and_restoring_both_ways():
    changes = {
        (group.level(p, a), group.level(q, group.target(q, p, a)))
        for p in group.COUNTS
        for q in group.COUNTS
        for a in shared.MESHES
    }
    assert len(changes) == 9


def test_each_slice_is_written_by_one_process(restored):
    out, _ = restored
    sizes = {}
    for count in group.COUNTS:
        folder = group.saved(out, count, "1x8")
        files = sorted(folder.glob("arrays*.npy"))
        assert len(files) == count
        assert files[0].name == ("arrays.npy" if count == 1 else f"arrays-00000-of-{count:05d}.npy")
        sizes[count] = [path.stat().st_size for path in files]
    assert len({sum(each) for each in sizes.values()}) == 1
    assert max(sizes[4]) < 0.5 * sizes[1][0]
    of_copies = [path.stat().st_size for path in group.saved(out, 4, "8x1").glob("arrays*.npy")]
    assert max(of_copies) < 0.5 * sum(of_copies)  # every process has a copy of all, and writes its share


def test_host_memory_holds_its_share_and_one_leaf(restored):
    for text in restored[1][2]:
        assert "within bounds" in text


def test_processes_fail_as_one(restored):
    out, said = restored
    first, second = said[2]
    assert "refused (0,): cannot write the checkpoint" in first
    assert "refused (0,): process 0: cannot write the checkpoint" in second
    assert "refused (1,): cannot write the checkpoint" in first
    assert "process 1 could not write its part; its log has the reason" in first
    assert "refused (1,): cannot write " in second
    assert "arrays-00001-of-00002.npy: [Errno 28] No space left on device" in second
    assert all("refused (0, 1): cannot write" in text for text in (first, second))
    assert [path.name for path in (out / "failing").iterdir()] == ["step_00000004"]
