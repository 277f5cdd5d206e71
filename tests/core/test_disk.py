"""States on a disk: the process holds none of their pages. That no bit changes: test_step.py."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from test_step import make_batches

from experiments.harness.trainings import make_step
from lowmem.core import homes, parameters
from lowmem.core.decoder import Decoder
from lowmem.core.homes import DiskStates
from lowmem.core.layout import Layout
from lowmem.core.optimizers import get_optimizer
from lowmem.core.states_folder import in_memory
from lowmem.core.window import READ_AHEAD
from lowmem.errors import InputError, LowmemError
from lowmem.run.checkpoint import load_checkpoint, save_checkpoint
from lowmem.units import MIB
from reference import tiny_model
from runs import failing, mapping_of

STATE = {"step": 1, "updates": 1, "loss_scale": {}, "skipped": 0, "eval_first": None, "recoveries": []}
ON_DISK = {"states_on_gpu": 0, "states_on_disk": 99, "micro_batch": 1}


@pytest.fixture
def small_pieces(monkeypatch):
    """Several pieces to a part, so that they begin within its mappings, and not at the pages' ends."""
    monkeypatch.setattr(parameters, "PIECE", 512)


def test_what_is_on_the_disk_is_spread_evenly():
    assert Layout(1, states_on_disk=0).units_on_disk(10) == []
    assert Layout(1, states_on_disk=5).units_on_disk(10) == [1, 3, 5, 7, 9]
    assert Layout(1, states_on_disk=3, states_on_gpu=4).units_on_disk(10) == [5, 7, 9]
    assert Layout(1, states_on_disk=99, states_on_gpu=4).units_on_disk(10) == [4, 5, 6, 7, 8, 9]
    assert Layout(1, states_on_disk=2, states_on_gpu=10).units_on_disk(10) == []


def test_states_of_matrices_are_on_the_disk_and_nothing_is_left_in_the_folder(tmp_path):
    states = DiskStates(tmp_path / "new" / "folder")
    tensor = states.tensor(1000, torch.float32)
    assert torch.equal(tensor, torch.zeros(1000)) and list((tmp_path / "new" / "folder").iterdir()) == []
    step, store = make_step(tiny_model("gpt2", 0.0, 0), precision="bf16", **ON_DISK)
    for part in store.parts:
        assert part.on_disk == ("matrices" in part.name)
        for piece in part.pieces:
            assert piece.on_disk == (("low", "m", "v") if part.on_disk else ())
            for state in piece.state.values():
                assert (getattr(homes._place(state)[0], "file", None) is not None) == part.on_disk


@pytest.mark.parametrize("start", [0, 1000])
def test_reading_and_writing_move_every_byte_whatever_the_system_moves_at_once(tmp_path, monkeypatch, start):
    home = DiskStates(tmp_path).tensor(5000, torch.bfloat16)[start:]
    before = home.clone()
    values = torch.randn(5000).bfloat16()[start:]
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda number, content, offset: pwrite(number, content[:777], offset))
    monkeypatch.setattr(os, "preadv", lambda number, views, offset: preadv(number, [views[0][:333]], offset))
    homes.copy(home, values)
    assert torch.equal(home, values) and not torch.equal(home, before), "the mapping shows what was written"
    home[7] = 42
    read = torch.empty_like(values)
    homes.copy(read, home)
    assert torch.equal(read, home) and read[7] == 42


def test_pages_of_the_disk_are_not_the_processs(tmp_path):
    """What is read and written as a file never counts; what the mapping was used for counts until it is let go."""
    home = DiskStates(tmp_path).tensor(16 * MIB, torch.uint8)
    values = torch.ones(16 * MIB, dtype=torch.uint8)
    before = _mapped_bytes()
    homes.copy(home, values)
    homes.copy(values, home)
    assert _mapped_bytes() - before < MIB
    assert int(home.sum()) == 16 * MIB
    assert _mapped_bytes() - before > 15 * MIB
    homes.drop_pages(home[5 * MIB + 1 : 10 * MIB])
    assert _mapped_bytes() - before < MIB and int(home.sum()) == 16 * MIB


def test_loading_saving_and_masters_let_go_of_every_page(tmp_path):
    def states_mapped():
        return {part.name for part in store.parts for state in part.state.values() if _resident(state)}

    step, store = make_step(tiny_model("gpt2", 0.0, 0), precision="bf16", **ON_DISK)
    for batch in make_batches(2):
        step(batch, 0, 1e-3)
    step.flush()
    streamed_in_ram = {part.name for part in store.parts if not part.on_disk}
    assert states_mapped() <= streamed_in_ram, "made, written and updated"
    saved = save_checkpoint(tmp_path, store, STATE, keep_last=1)
    assert states_mapped() <= streamed_in_ram, "saved"
    masters = [(name, run.clone()) for name, run in store.masters()]
    assert states_mapped() <= streamed_in_ram, "exported"
    store.clear()
    assert states_mapped() <= streamed_in_ram, "cleared"
    load_checkpoint(saved, store, {})
    assert states_mapped() <= streamed_in_ram, "loaded"
    for (name, run), (other, loaded) in zip(masters, store.masters(), strict=True):
        assert name == other and torch.equal(run, loaded)


def test_a_checkpoint_goes_from_any_place_to_any_other(tmp_path):
    batches = make_batches(3)
    cases = {"disk": ON_DISK, "some": ON_DISK | {"states_on_disk": 3}, "resident": {"micro_batch": 1}}
    ends = []
    for number, (before, after) in enumerate([("disk", "resident"), ("resident", "disk"), ("disk", "some")]):
        step, store = make_step(tiny_model("gpt2", 0.0, 0), **cases[before])
        step(batches[0], 0, 1e-3)
        step.flush()
        saved = save_checkpoint(tmp_path / str(number), store, STATE, keep_last=1)
        step, store = make_step(tiny_model("gpt2", 0.0, 1), **cases[after])
        load_checkpoint(saved, store, {})
        step(batches[1], 1, 1e-3)
        step.flush()
        ends.append([run for _, run in store.masters()])
    for end in ends[1:]:
        assert all(torch.equal(one, other) for one, other in zip(ends[0], end, strict=True))


def test_the_disk_is_asked_a_few_pieces_ahead_and_in_order(small_pieces, monkeypatch):
    asked, fetched, furthest = [], [], []

    step, store = make_step(tiny_model("gpt2", 0.0, 0), **ON_DISK | {"states_on_disk": 4})

    def reading_ahead(places):
        asked.append(id(places[0]))
        furthest.append(len(asked) - len(fetched))

    def reading(pairs):
        fetched.append(id(pairs[0][1]))
        assert len(asked) >= len(fetched)
        read(pairs)

    step.transfers.read_ahead = reading_ahead
    read, step.transfers.read = step.transfers.read, reading
    for batch in make_batches(2):
        step(batch, 0, 1e-3)
    step.flush()
    pieces = [id(piece.state[piece.on_disk[0]]) for piece in store.pieces if piece.on_disk]
    assert asked == fetched == 2 * pieces and len(pieces) > READ_AHEAD
    assert max(furthest) == READ_AHEAD


@pytest.mark.parametrize("trouble", ["full", "no folder", "reading", "writing", "shorter"])
def test_what_a_disk_refuses_is_one_sentence(tmp_path, monkeypatch, trouble):
    fail = failing(errno.ENOSPC if trouble == "full" else errno.EIO)
    (tmp_path / "file").touch()
    if trouble == "no folder":
        with pytest.raises(InputError, match="--states-folder .*file cannot be written: it is no folder"):
            DiskStates(tmp_path / "file")
        return
    states = DiskStates(tmp_path)
    if trouble == "full":
        monkeypatch.setattr(os, "posix_fallocate", fail)
        with pytest.raises(LowmemError, match="No space left on device; free some room there"):
            states.tensor(10, torch.float32)
        return
    home = states.tensor(10, torch.float32)
    if trouble == "shorter":
        os.ftruncate(states.number, 0)
    monkeypatch.setattr(os, "preadv", fail if trouble == "reading" else os.preadv)
    monkeypatch.setattr(os, "pwrite", fail if trouble == "writing" else os.pwrite)
    with pytest.raises(LowmemError, match="the disk of --states-folder .* failed: .*newest checkpoint"):
        homes.copy(home, torch.ones(10)) if trouble == "writing" else homes.copy(torch.ones(10), home)


def test_states_on_a_disk_need_what_makes_them():
    model = tiny_model("gpt2", 0.0, 0)
    with pytest.raises(ValueError, match="nothing to make them with"):
        parameters.Store(
            Decoder(model), torch.device("cpu"), torch.float32, get_optimizer("adamw"), Layout(1, states_on_disk=1)
        )


def test_file_systems_in_memory_are_known(monkeypatch):
    mounts = {"/": "ext4", "/dev/shm": "tmpfs", "/dev/shm/real": "xfs", "/my ram": "ramfs"}
    found = [SimpleNamespace(mountpoint=place, fstype=kind) for place, kind in mounts.items()]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: found)
    assert in_memory(Path("/home/me")) is None
    assert in_memory(Path("/dev/shm/states")) == "tmpfs"
    assert in_memory(Path("/dev/shm/real/states")) is None
    assert in_memory(Path("/my ram")) == "ramfs"


def _mapped_bytes() -> int:
    """Pages of files that count as this process's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssFile", "RssShmem")))


def _resident(tensor: torch.Tensor) -> bool:
    """Whether any page of the mapping that `tensor` is in counts as this process's."""
    return int(mapping_of(tensor.untyped_storage().data_ptr())["Rss"].split()[0]) > 0
