"""Nothing that was saved is lost, and loaded bits are the saved ones.

Seen to fail: without the hashes (damage), without fsync of files, folder or parent (order), with the old checkpoint
removed where it is put aside, or not put back, or removed in place (stages), without the sweep, with identities or
headers not compared, with `low` left out, with a whole tensor copied (RAM), without the lock.
"""

import errno
import io
import json
import os
import random
import shutil
import struct
import subprocess
import time
from collections import namedtuple
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, GPT2Config

from experiments.harness.trainings import make_step
from lowmem import files
from lowmem.core.decoder import Decoder
from lowmem.core.layout import Layout
from lowmem.core.optimizers import get_optimizer
from lowmem.core.parameters import Store
from lowmem.core.precision import WORKING_DTYPES, LossScale
from lowmem.core.step import TrainingStep
from lowmem.errors import InputError, LowmemError
from lowmem.files import Manifest, to_json, write_manifest
from lowmem.run import checkpoint as checkpoint_module
from lowmem.run.checkpoint import load_checkpoint, load_newest, save_checkpoint
from lowmem.run.folder import MARGIN_BYTES, find_checkpoints, lock_run
from reference import make_batch, tiny_model
from runs import failing, python, rehash

RESIDENT, MIXED, STREAMED = 99, 2, 0


def make_store(precision="fp32", optimizer="adamw", states_on_gpu=RESIDENT, model=None, fill=None) -> Store:
    """Returns a tiny decoder's store; `fill` seeds random bytes in every tensor (NaNs, infinities and all)."""
    decoder, dtype = Decoder(model or tiny_model("gpt2")), WORKING_DTYPES[precision]
    layout = Layout(1, states_on_gpu=states_on_gpu)
    store = Store(decoder, torch.device("cpu"), dtype, get_optimizer(optimizer), layout)
    if fill is not None:
        generator = torch.Generator().manual_seed(fill)
        for tensor in tensors_of(store).values():
            bits = tensor.view(torch.uint8)
            bits.copy_(torch.randint(0, 256, bits.shape, generator=generator, dtype=torch.uint8))
    return store


def smallest_store(fill=None) -> Store:
    """Returns a store of one block of width 8, with SGD: four files."""
    config = GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=11, n_positions=8, bos_token_id=0, eos_token_id=0)
    return make_store("bf16", "sgd", model=AutoModelForCausalLM.from_config(config), fill=fill)


def tensors_of(store: Store) -> dict[str, torch.Tensor]:
    return {
        f"{part.name} {key}": tensor
        for part in store.parts
        for key, tensor in {"working": part.working, **part.state}.items()
    }


def differences(store: Store, other: Store) -> list[str]:
    """Returns the names of the tensors whose bytes differ."""
    mine, theirs = tensors_of(store), tensors_of(other)
    assert mine.keys() == theirs.keys()
    return [name for name in mine if not torch.equal(mine[name].view(torch.uint8), theirs[name].view(torch.uint8))]


def make_state(step: int, **identity) -> dict:
    given = {"step": step, "updates": step, "loss_scale": {"scale": 1.0, "good_steps": 0}, "identity": identity}
    return given | {"skipped": 0, "eval_first": None, "recoveries": []}


def save(folder: Path, store: Store, step: int, keep_last: int = 2, **identity) -> Path:
    return save_checkpoint(folder, store, make_state(step, **identity), keep_last=keep_last)


def names_in(folder: Path) -> list[str]:
    return sorted(os.listdir(folder / "checkpoints"))


def newest(folder: Path, store: Store) -> tuple[Path | None, list[str]]:
    """Loads the newest valid checkpoint into `store`; returns its path or None, and the sentences about it."""
    said: list[str] = []
    loaded = load_newest(find_checkpoints(folder, "auto", said.append), store, {}, said.append)
    return loaded and loaded[0], said


# --- what is in a file


@pytest.mark.quick(3)
@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit", "sgd"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_every_bit_comes_back_wherever_the_states_lie(tmp_path, precision, optimizer):
    saved = make_store(precision, optimizer, MIXED, fill=1)
    state = make_state(7, seed=3, note="ü", rate=0.1 + 0.2)
    checkpoint = save_checkpoint(tmp_path, saved, state, keep_last=1)
    assert checkpoint == tmp_path / "checkpoints" / "step-00000007"
    for states_on_gpu in (RESIDENT, STREAMED):
        loaded = make_store(precision, optimizer, states_on_gpu, fill=2)
        assert load_checkpoint(checkpoint, loaded, {"seed": 3}) == state | {"metrics": None}
        assert differences(loaded, saved) == []
        again = save_checkpoint(tmp_path / str(states_on_gpu), loaded, state, keep_last=1)
        for path in checkpoint.iterdir():
            assert (again / path.name).read_bytes() == path.read_bytes(), "the file depends on the placement"


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
def test_the_files_are_safetensors_and_say_where_each_parameter_lies(tmp_path, optimizer):
    store = make_store("bf16", optimizer, fill=1)
    checkpoint = save(tmp_path, store, 1)
    seen = set()
    for part in store.parts:
        with safe_open(checkpoint / f"{part.name.replace(' ', '-')}.safetensors", framework="pt") as file:
            assert set(file.keys()) == {"working", *part.state}
            for name, tensor in {"working": part.working, **part.state}.items():
                read = file.get_tensor(name)
                assert read.dtype is tensor.dtype and torch.equal(read.view(torch.uint8), tensor.view(torch.uint8))
            flat = file.get_tensor("working")
            for name, (start, *shape) in json.loads(file.metadata()["parameters"]).items():
                there = flat[start : start + torch.Size(shape).numel()].view(shape)
                assert torch.equal(there.view(torch.uint8), part.view(part.working, name).view(torch.uint8))
                seen.add(name)
    assert seen == {name for name, _ in store.masters()}


def test_tensors_of_many_chunks_and_writes_that_the_system_cuts_short(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_module, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(files, "CHUNK_BYTES", 777)

    class Short(io.FileIO):
        def write(self, data):
            return super().write(data[:333])

        def readinto(self, buffer):
            return super().readinto(memoryview(buffer)[:211])

    def short_open(path, mode, buffering=-1):
        return io.BufferedReader(Short(path, mode)) if buffering else Short(path, mode)

    monkeypatch.setattr(files, "open", short_open, raising=False)
    saved, loaded = make_store("bf16", fill=1), make_store("bf16", fill=2)
    save(tmp_path, saved, 1)
    _, said = newest(tmp_path, loaded)
    assert differences(loaded, saved) == [] and said == []


# --- training, continued


def fresh(precision, optimizer, states_on_gpu, seed):
    """Returns a fresh model and all that trains it; weights are drawn from `seed`."""
    return make_step(
        tiny_model("gpt2", dropout=0.1, seed=seed), precision=precision, optimizer=optimizer,
        states_on_gpu=states_on_gpu, micro_batch=1, segment_blocks=2,
        loss_scale=LossScale(precision == "fp16", scale=2.0**30, growth_interval=2),  # overflows at first, then grows
    )  # fmt: skip


def train(step: TrainingStep, first: int, last: int) -> list:
    return [step(make_batch(done, rows=2, seq=16), done, 1e-3 * (1 + step.updates)) for done in range(first, last)]


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("precision", "optimizer"),
    [("fp32", "adamw"), ("bf16", "adamw"), ("fp16", "adamw"), ("bf16", "adamw8bit"), ("bf16", "sgd")],
)
def test_a_run_stopped_twice_is_bitwise_the_run_that_was_not(tmp_path, precision, optimizer):
    steps = 16 if precision == "fp16" else 6  # fp16: the scale has to come down first
    straight, expected = fresh(precision, optimizer, RESIDENT, seed=0)
    results = train(straight, 0, steps)
    straight.flush()

    step, store = fresh(precision, optimizer, STREAMED, seed=0)
    continued, done = [], 0
    for index, (stop, states_on_gpu) in enumerate([(steps // 2, RESIDENT), (steps - 1, STREAMED)]):
        continued += train(step, done, stop)
        step.flush()
        state = make_state(stop) | {"updates": step.updates, "loss_scale": step.loss_scale.state()}
        save_checkpoint(tmp_path, store, state, keep_last=2)
        step, store = fresh(precision, optimizer, states_on_gpu, seed=index + 1)  # other weights: all must go
        state = load_checkpoint(newest(tmp_path, store)[0], store, {})
        done, step.updates = state["step"], state["updates"]
        step.loss_scale.load(state["loss_scale"])
    continued += train(step, done, steps)
    step.flush()

    assert repr(continued) == repr(results)  # as text, in which nan is nan
    assert differences(store, expected) == []
    assert (precision == "fp16") == (not all(result.updated for result in results))


# --- saves that do not finish


class Stages:
    """Records in `events` every act of a save that changes the disk, as (what, path). Between `begin` and `end`, a
    function is called with its number before each. A write is two acts: before it, and when half of it is done."""

    def __init__(self, monkeypatch):
        self.events: list[tuple[str, str]] = []
        self._on = None
        stages = self

        class Tracked(io.FileIO):
            def write(self, data):
                stages.tick("write", self.name)
                half = super().write(data[: len(data) // 2])
                stages.tick("half", self.name)
                return half + super().write(data[half:])

        def tracked_open(path, mode, buffering=-1):
            return Tracked(path, mode) if mode == "xb" else open(path, mode, buffering)

        monkeypatch.setattr(files, "open", tracked_open, raising=False)
        for name in ("mkdir", "rename", "rmdir", "unlink", "fsync"):
            monkeypatch.setattr(os, name, self._announced(name, getattr(os, name)))

    def _announced(self, name, function):
        def call(target, *arguments, **keywords):
            if name == "fsync":  # a killed process loses nothing that it wrote, so the wait can be spared
                return self.tick(name, os.readlink(f"/proc/self/fd/{target}"))
            self.tick(name, target)
            return function(target, *arguments, **keywords)

        return call

    def begin(self, on):
        self.events, self._on = [], on

    def end(self):
        self._on = None

    def tick(self, what, path):
        if self._on is not None:
            self.events.append((what, str(path)))
            self._on(len(self.events) - 1)


SCENES = {  # steps saved before, the step being saved, keep_last
    "first": ([], 1, 1),
    "second of one kept": ([1], 2, 1),
    "third of two kept": ([1, 2], 3, 2),
    "the same again": ([2], 2, 1),
    "back to an earlier step": ([8], 3, 1),
}


@pytest.mark.quick(3)
@pytest.mark.parametrize("how", ["killed", "disk full", "interrupted"])
@pytest.mark.parametrize("scene", SCENES)
def test_a_save_that_ends_at_any_stage_leaves_a_valid_checkpoint(tmp_path, monkeypatch, scene, how):
    before, step, keep_last = SCENES[scene]
    start, folder = tmp_path / "start", tmp_path / "run"
    start.mkdir()
    old = {number: smallest_store(fill=number) for number in before}
    for number, store in old.items():
        save(start, store, number)
    new, loaded = smallest_store(fill=100), smallest_store()
    stages = Stages(monkeypatch)

    def run(on) -> list[tuple[str, str]]:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(start, folder)
        stages.begin(on)
        try:
            save(folder, new, step, keep_last)
        finally:
            stages.end()
        return stages.events

    events = list(run(lambda *_: None))
    commit = next(number for number, (what, path) in enumerate(events) if what == "rename" and "/.tmp-" in path)
    assert len(events) > 30
    for stage, event in enumerate(events):

        def stop(number, stage=stage):
            if number == stage and how == "killed":
                os._exit(9)
            if number == stage:
                raise OSError(errno.ENOSPC, "No space left on device") if how == "disk full" else KeyboardInterrupt

        if how == "killed":
            child = os.fork()
            if child == 0:
                run(stop)
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
        else:
            if event == ("mkdir", str(folder / "checkpoints")) and before:
                continue  # it is there, so that it could not be made is no error
            with pytest.raises((LowmemError, KeyboardInterrupt)) if stage <= commit else suppress(BaseException):
                run(stop)
            assert stage > commit or not list(folder.glob("checkpoints/.tmp*")), "an error leaves nothing behind"

        checkpoint, said = newest(folder, loaded)
        assert said == [], event
        assert not list(folder.glob("checkpoints/.*")), "what a killed save left is swept"
        possible = {old_step: store for old_step, store in old.items() if old_step == max(before)}
        if stage > commit:
            possible = {step: new} | {old_step: store for old_step, store in old.items() if old_step > step}
        if checkpoint is None:
            assert possible == {}, event
        else:
            assert differences(loaded, possible[int(checkpoint.name[-8:])]) == [], event


def test_all_is_on_the_disk_before_the_rename_and_nothing_is_removed_before_it(tmp_path, monkeypatch):
    store = make_store(fill=1)
    save(tmp_path, store, 1)
    stages = Stages(monkeypatch)
    stages.begin(lambda number: None)
    save(tmp_path, store, 2, keep_last=1)
    stages.end()
    root = str(tmp_path / "checkpoints")
    renamed = stages.events.index(("rename", f"{root}/.tmp-step-00000002"))
    written = {path for what, path in stages.events if what == "write"}
    assert len(written) == len(store.parts) + 2
    for path in written:
        last = max(number for number, event in enumerate(stages.events) if event == ("half", path))
        assert last < stages.events.index(("fsync", path)) < renamed
    last_file = max(number for number, (what, path) in enumerate(stages.events) if path in written and what == "fsync")
    assert stages.events[last_file][1].endswith("manifest.json")
    assert last_file < stages.events.index(("fsync", f"{root}/.tmp-step-00000002")) < renamed
    parent = stages.events.index(("fsync", root))
    removed = [number for number, (what, _) in enumerate(stages.events) if what in ("unlink", "rmdir")]
    assert renamed < parent < stages.events.index(("rename", f"{root}/step-00000001")) < min(removed)


@pytest.mark.parametrize(("number", "advice"), [
    (errno.EDQUOT, "Free some room"), (errno.EFBIG, "ulimit -f"), (errno.EROFS, "Make the folder writable"),
])  # fmt: skip
def test_who_cannot_save_is_told_what_helps(tmp_path, monkeypatch, number, advice):
    (tmp_path / "earlier").mkdir()
    save(tmp_path / "earlier", smallest_store(fill=1), 1)
    monkeypatch.setattr(checkpoint_module, "write_manifest", failing(number))
    for folder, kept in (("first", ""), ("earlier", "; earlier checkpoints are still there")):
        with pytest.raises(LowmemError, match=rf"{os.strerror(number)}{kept}\. .*{advice}"):
            save(tmp_path / folder, smallest_store(fill=1), 2)


def test_a_full_disk_is_found_before_a_byte_is_written(tmp_path, monkeypatch):
    store = make_store(fill=1)
    save(tmp_path, store, 1)
    usage = namedtuple("usage", "total used free")
    needed = sum(tensor.nbytes for tensor in tensors_of(store).values())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(2**40, 2**40 - needed, needed))
    stages = Stages(monkeypatch)
    stages.begin(lambda number: None)
    with pytest.raises(LowmemError, match="step 2 could not be saved .* needed, .* free on the disk") as caught:
        save(tmp_path, store, 2)
    stages.end()
    assert caught.value.exit_code == 1 and "write" not in dict(stages.events)
    assert newest(tmp_path, store)[0].name == "step-00000001"


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root may mount")
def test_a_disk_that_fills_up_while_saving(tmp_path, monkeypatch):
    """On a real small file system; the errors of a quota and of a full disk without one are in the test of stages."""
    folder = tmp_path / "small"
    folder.mkdir()
    store, loaded = make_store(fill=1), make_store()
    needed = sum(tensor.nbytes for tensor in tensors_of(store).values())
    size = f"size={needed + MARGIN_BYTES + 100 * 2**10}"
    if subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("no right to mount here")
    try:
        save(folder, store, 1)
        with pytest.raises(LowmemError, match="free on the disk"):
            save(folder, store, 2)
        monkeypatch.setattr(checkpoint_module, "MARGIN_BYTES", -(2**30))  # as if something else took the room meanwhile
        with pytest.raises(LowmemError, match="No space left on device.*still there.*Free some room"):
            save(folder, store, 2)
        assert names_in(folder) == ["step-00000001"]
        newest(folder, loaded)
        assert differences(loaded, store) == []
        shutil.rmtree(folder / "checkpoints")
        save(folder, store, 2)  # room again
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("number", [errno.EDQUOT, errno.EACCES, errno.EIO])
def test_any_refusal_of_the_system_is_one_clear_error(tmp_path, monkeypatch, number):
    monkeypatch.setattr(checkpoint_module, "write", failing(number))
    with pytest.raises(LowmemError, match=os.strerror(number)) as caught:
        save(tmp_path, smallest_store(), 2)
    assert caught.value.exit_code == 1 and names_in(tmp_path) == []
    assert ("quota" in str(caught.value)) == (number == errno.EDQUOT)
    (tmp_path / "checkpoints").rmdir()
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(LowmemError, match="could not be saved"):
        save(tmp_path, smallest_store(), 2)


# --- which one is taken


def damages(checkpoint: Path):
    """Yields (file, how, its damaged content or None for a missing file): flips all over, cuts, additions."""
    generator = random.Random(0)
    for path in sorted(checkpoint.iterdir()):
        content = path.read_bytes()
        count = 40 if path.suffix == ".json" else 8
        places = {0, 1, 7, 8, 20, len(content) // 2, len(content) - 2}
        for place in sorted(places | {generator.randrange(len(content) - 1) for _ in range(count)}):
            flipped = bytearray(content)
            flipped[place] ^= 1 << generator.randrange(8)
            if flipped[place : place + 1].isspace() and content[place : place + 1].isspace():
                continue  # one blank for another, in the manifest: no harm
            yield path.name, f"byte {place} flipped", bytes(flipped)
        for size in (0, 1, len(content) // 2, len(content) - 1 - (path.suffix == ".json")):
            yield path.name, f"cut to {size}", content[:size]
        yield path.name, "longer", content + b"x"
        yield path.name, "missing", None


def test_a_damaged_checkpoint_is_skipped_and_the_file_named(tmp_path):
    store, other = smallest_store(fill=1), smallest_store()
    first, second = save(tmp_path, store, 1), save(tmp_path, store, 2)
    count = 0
    for name, how, content in damages(second):
        path = second / name
        sound = path.read_bytes()
        replace(path, content)
        checkpoint, said = newest(tmp_path, other)
        assert (checkpoint, differences(other, store)) == (first, []), (name, how)
        assert len(said) == 1 and str(path) in said[0] and "skipped" in said[0], (name, how, said)
        with pytest.raises(InputError) as caught:
            load_checkpoint(second, other, {})
        assert str(path) in str(caught.value), (name, how)
        path.write_bytes(sound)
        count += 1
    assert count > 150
    assert newest(tmp_path, other) == (second, [])


def test_with_nothing_valid_left_a_run_starts_anew_and_says_why(tmp_path):
    store, new = make_store(fill=2), make_store()
    for tensor in tensors_of(new).values():
        tensor.zero_()
    assert newest(tmp_path, store) == (None, []) and differences(store, make_store(fill=2)) == []
    part = save(tmp_path, make_store(fill=1), 1) / (store.parts[-1].name.replace(" ", "-") + ".safetensors")
    part.write_bytes(part.read_bytes()[:-1] + b"?")  # found when the files before it have been loaded
    (tmp_path / "checkpoints" / "step-00000002").mkdir()  # the newest folder, empty
    checkpoint, said = newest(tmp_path, store)
    assert checkpoint is None and differences(store, new) == []
    assert ["step-00000002" in said[0], "manifest.json" in said[0], part.name in said[1]] == [True] * 3
    assert "are kept as unreadable-step-" in said[2]
    save(tmp_path, make_store(fill=1), 1)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000001", "unreadable-step-00000001", "unreadable-step-00000002"]


def test_a_disk_that_does_not_answer_is_no_damage(tmp_path, monkeypatch):
    """Nothing is skipped, and nothing is put aside: the next attempt may read it."""
    save(tmp_path, make_store(fill=1), 1)
    monkeypatch.setattr(Path, "read_bytes", failing(errno.EIO))
    with pytest.raises(LowmemError, match="manifest.json cannot be read: Input/output error") as error:
        newest(tmp_path, make_store())
    assert not isinstance(error.value, InputError)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]


def test_a_damaged_newest_checkpoint_is_replaced_when_its_step_comes_again(tmp_path):
    store, loaded = make_store(fill=1), make_store()
    save(tmp_path, store, 1)
    (save(tmp_path, store, 2) / "manifest.json").write_text("{}")
    assert newest(tmp_path, loaded)[0].name == "step-00000001"
    save(tmp_path, store, 2)
    checkpoint, said = newest(tmp_path, loaded)
    assert (checkpoint.name, said, differences(loaded, store)) == ("step-00000002", [], [])


def test_the_last_k_are_kept_and_what_a_restart_left_behind_goes(tmp_path):
    store = smallest_store()
    for step in range(1, 6):
        save(tmp_path, store, step, keep_last=3)
    assert names_in(tmp_path) == ["step-00000003", "step-00000004", "step-00000005"]
    save(tmp_path, store, 123456789, keep_last=2)
    assert names_in(tmp_path) == ["step-00000005", "step-123456789"]
    assert newest(tmp_path, store)[0].name == "step-123456789"
    save(tmp_path, store, 0, keep_last=2)  # --resume never in the same folder
    assert names_in(tmp_path) == ["step-00000000"]


def test_resume_takes_a_checkpoint_a_run_folder_or_nothing(tmp_path):
    store = smallest_store()
    first, second = save(tmp_path / "one", store, 1), save(tmp_path / "one", store, 2)
    said: list[str] = []
    assert find_checkpoints(tmp_path / "two", str(first), said.append) == [first]
    for folder in (tmp_path / "one", tmp_path / "one" / "checkpoints"):
        assert find_checkpoints(tmp_path / "two", str(folder), said.append) == [second, first]
    assert find_checkpoints(tmp_path / "two", "never", said.append) == []
    assert said == [] and not (tmp_path / "two").exists()
    assert find_checkpoints(tmp_path / "one", "never", said.append) == []
    assert "step-00000001" in said[0] and "step-00000002" in said[0]
    assert find_checkpoints(tmp_path / "one", str(first), said.append) == [first]
    assert "step-00000001" not in said[1] and "step-00000002" in said[1]
    (tmp_path / "file").touch()
    for wrong in ("nowhere", "file", "."):
        with pytest.raises(InputError, match="--resume"):
            find_checkpoints(tmp_path / "two", str(tmp_path / wrong), said.append)
    (second / "manifest.json").unlink()
    assert load_newest([second, first], store, {}, said.append, required=True)[0] == first
    with pytest.raises(InputError, match="manifest.json cannot be read"):
        load_newest([second], store, {}, said.append, required=True)


def test_a_checkpoint_with_the_hash_of_earlier_versions_is_read(tmp_path, monkeypatch):
    store = make_store(fill=1)
    with monkeypatch.context() as patch:
        patch.setattr(files, "_HASH", "blake2b")
        checkpoint = save(tmp_path, store, 1)
    assert json.loads((checkpoint / "manifest.json").read_text())["hash"] == "blake2b"
    assert newest(tmp_path, store) == (checkpoint, [])
    checkpoint = save(tmp_path, store, 2)
    assert json.loads((checkpoint / "manifest.json").read_text())["hash"] == "xxh3_128"


# --- what is refused


def refused(checkpoint: Path, store: Store, expected: dict) -> str:
    """Returns the sentence with which loading is refused; `store` must be unchanged."""
    before = {name: tensor.clone() for name, tensor in tensors_of(store).items()}
    with pytest.raises(InputError) as caught:
        load_checkpoint(checkpoint, store, expected)
    assert caught.value.exit_code == 2
    assert all(torch.equal(before[name], tensor) for name, tensor in tensors_of(store).items()), "store was touched"
    return str(caught.value)


def test_other_settings_or_data_are_refused_with_every_difference(tmp_path):
    store = make_store()
    identity = {"batch": 64, "lr": 1e-3, "schedule": "cosine", "clip_norm": 1.0, "data": "aa", "steps": 9, "seed": 0}
    checkpoint = save(tmp_path, store, 1, **identity)
    load_checkpoint(checkpoint, store, identity)
    changed = identity | {"batch": 32, "schedule": "linear", "clip_norm": None, "data": "bb"}
    sentence = refused(checkpoint, store, changed)
    assert "--batch 64 -> 32; --schedule cosine -> linear; --clip-norm 1.0 -> 0" in sentence
    assert "the data, their weights or the tokenizer have changed" in sentence
    assert "--lr" not in sentence and "--seed" not in sentence and "--steps" not in sentence
    assert "--optimizer is missing" in refused(checkpoint, store, identity | {"optimizer": "sgd"})
    assert "kind is missing" in refused(checkpoint, store, {"kind": 1})


def rewrite(checkpoint: Path, change) -> None:
    """Applies `change` to the folder and writes the manifest again, as if this had been saved."""
    change(checkpoint)
    rehash(checkpoint)


def replace(path: Path, content: bytes | None) -> None:
    path.unlink() if content is None else path.write_bytes(content)


@pytest.mark.parametrize("key", ["step", "updates", "loss_scale", "skipped", "eval_first", "recoveries"])
def test_a_state_that_lacks_what_a_run_needs_is_refused(tmp_path, key):
    checkpoint, state = save(tmp_path, make_store(), 1), make_state(1)
    del state[key]
    rewrite(checkpoint, lambda folder: replace(folder / "state.json", to_json(state)))
    assert f"state.json lacks {key}" in refused(checkpoint, make_store(), {})


def change_header(path: Path, change) -> None:
    content = path.read_bytes()
    size = 8 + struct.unpack("<Q", content[:8])[0]
    text = json.dumps(change(json.loads(content[8:size]))).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[size:])


@pytest.mark.parametrize(("change", "said"), [
    (lambda header: {key: value for key, value in header.items() if key != "v"}, "the tensor v: missing"),
    (lambda header: header | {"w": header["v"]}, "the tensor w: unknown here"),
    (lambda header: header | {"m": header["v"]}, "the tensor m: not as in this run"),
    (lambda header: header | {"__metadata__": {"part": "x"}}, "the parameters: not as in this run"),
    (lambda header: dict(reversed(header.items())), "order"), (lambda header: [], "missing"),
])  # fmt: skip
def test_a_header_that_is_not_this_runs_is_refused(tmp_path, change, said):
    checkpoint = save(tmp_path, make_store(), 1)
    rewrite(checkpoint, lambda folder: change_header(folder / "block-0-matrices.safetensors", change))
    sentence = refused(checkpoint, make_store(), {})
    assert "block-0-matrices.safetensors" in sentence and said in sentence


NOTHING_SUCH = {  # None: the file is missing
    "state.json": [None, b"", b"[]", b"7", b"{", b"[" * 100_000, b"\xff"],
    "final-vectors.safetensors": [None, b"", b"\xff" * 8, b"\xff" * 100, struct.pack("<Q", 3) + b"{}", b"\0" * 8],
}


@pytest.mark.parametrize(("name", "content"), [(name, one) for name, each in NOTHING_SUCH.items() for one in each])
def test_a_file_that_lacks_what_its_name_says_is_refused(tmp_path, name, content):
    checkpoint = save(tmp_path, make_store(), 1)
    rewrite(checkpoint, lambda folder: replace(folder / name, content))
    assert name in refused(checkpoint, make_store(), {})


def test_another_optimizer_precision_or_model_is_refused(tmp_path):
    checkpoint = save(tmp_path, make_store("bf16", "adamw"), 1)
    for kind in (("bf16", "sgd"), ("bf16", "adamw8bit"), ("fp16", "adamw"), ("fp32", "adamw")):
        assert "another model, optimizer or precision" in refused(checkpoint, make_store(*kind), {})
    assert "another model" in refused(checkpoint, make_store("bf16", model=tiny_model("llama")), {})


def test_a_manifest_that_is_none_is_damage(tmp_path):
    for text in (
        b"", b"[]", b"{}", b"\xff", b"[" * 100_000, b'{"hash": "blake2b", "files": {}}',
        b'{"hash": "md5", "files": {}, "own": ""}', b'{"hash": [], "files": {}, "own": ""}',
    ):  # fmt: skip
        (tmp_path / "manifest.json").write_bytes(text)
        with pytest.raises(files.Damaged, match="manifest.json is not a manifest"):
            Manifest(tmp_path)
    (tmp_path / "manifest.json").unlink()
    (tmp_path / "file").touch()
    for size in (-1, 10**30):  # refused before it is allocated
        write_manifest(tmp_path, {"file": {"bytes": size, "hash": ""}})
        for read in (Manifest(tmp_path).verify, Manifest(tmp_path).read):
            with pytest.raises(files.Damaged):
                read("file")
        (tmp_path / "manifest.json").unlink()


# --- the lock


def test_the_lock_of_a_killed_run_holds_nobody_up(tmp_path):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        with lock_run(tmp_path):
            os.write(write, b"x")
            time.sleep(600)
    os.read(read, 1)
    with pytest.raises(InputError, match="another run"), lock_run(tmp_path):
        pass
    os.kill(child, 9)
    os.waitpid(child, 0)
    with lock_run(tmp_path):
        pass


def test_a_run_that_is_refused_leaves_no_folder(tmp_path):
    with pytest.raises(InputError, match="bad"), lock_run(tmp_path / "run"):
        raise InputError("bad")
    assert not (tmp_path / "run").exists()
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot be written"), lock_run(tmp_path / "file"):
        pass


# --- memory

MEASURED = """
import sys
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM, GPT2Config
from lowmem.core.layout import Layout
from lowmem.core.optimizers import get_optimizer
from lowmem.core.decoder import Decoder
from lowmem.run.checkpoint import load_newest, save_checkpoint
from lowmem.run.folder import find_checkpoints
from lowmem.core.parameters import Store
from lowmem.limits import ram_peak_bytes, reset_ram_peak

with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(GPT2Config(n_layer=4, n_embd=512, n_head=8, vocab_size=24000))
store = Store(Decoder(model), torch.device("cpu"), torch.float32, get_optimizer("adamw"), Layout(1, states_on_gpu=3))
tensors = [tensor for part in store.parts for tensor in (part.working, *part.state.values())]
for tensor in tensors:
    tensor.fill_(1.0)  # every page is there
assert sum(tensor.nbytes for tensor in tensors) > 280 * 2**20

def rise_mib(work):
    assert reset_ram_peak()
    before = ram_peak_bytes()
    work()
    return (ram_peak_bytes() - before) / 2**20

folder = Path(sys.argv[1])
state = dict.fromkeys(("step", "updates", "loss_scale", "skipped", "eval_first", "recoveries"), 1)
print(rise_mib(lambda: save_checkpoint(folder, store, state, keep_last=1)))
print(rise_mib(lambda: load_newest(find_checkpoints(folder, "auto", print), store, {}, print)))
"""


@pytest.mark.exhaustive
def test_saving_and_loading_take_one_chunk_of_ram(tmp_path):
    run = python("-c", MEASURED, tmp_path)
    assert run.returncode == 0, run.stderr
    save_mib, load_mib = (float(line) for line in run.stdout.split())
    assert max(save_mib, load_mib) < 32, (save_mib, load_mib)
