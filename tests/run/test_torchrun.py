"""The Large script under torchrun: two processes that train one model, on the CPU."""

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, ByT5Tokenizer, GPT2Config, T5Config

from experiments.harness.torchrun import ranks_of, start
from lowmem.errors import InputError, PlanError
from lowmem.planning.planner import make_plan
from lowmem.planning.question import Question
from lowmem.planning.simulated_ranks import Mesh
from lowmem.run.main import _in_a_sentence
from lowmem.run.metrics import read_metrics
from lowmem.run.several_ranks import meshes, of_one_rank, plan_of_ranks
from lowmem.settings import Settings
from lowmem.units import GIB, MIB
from runs import ROOT, SMALL, assert_same_run, loss_rows, python, stored, weights

RANKS = 2
OPTIONS = (*SMALL, "--micro-batch", "1", "--steps", "6", "--save-every", "2", "--eval-every", "3", "--clip-norm", "0.5")


def started(out: Path, text: Path, *options: str, **how) -> subprocess.Popen:
    script = [str(ROOT / "train_gpt2_large.py"), *OPTIONS, "--data", str(text), "--out", str(out), *options]
    return start(script, RANKS, stderr=subprocess.PIPE, **how)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, text) -> tuple[Path, str]:
    """The folder of a run that nothing interrupted, and what it printed."""
    out = tmp_path_factory.mktemp("torchrun") / "run"
    process = started(out, text, "--sample-prompt", "one")
    _, said = process.communicate()
    assert process.returncode == 0, said
    return out, said


def wait_for_step(process: subprocess.Popen, out: Path, step: int) -> None:
    while not any(row["step"] >= step for row in read_metrics(out / "metrics.jsonl")):
        assert process.poll() is None
        time.sleep(0.01)


def test_a_run_of_two_ranks_is_one_run(trained, train, tmp_path):
    out, said = trained
    assert train(tmp_path / "one", *OPTIONS[len(SMALL) :]) == 0
    for row, of_one in zip(loss_rows(out), loss_rows(tmp_path / "one"), strict=True):
        losses = [key for key in ("loss", "eval_loss") if key in of_one]
        assert [row[key] for key in losses] == pytest.approx([of_one[key] for key in losses], rel=1e-6)
        assert row["tokens"] == of_one["tokens"] and row["learning_rate"] == of_one["learning_rate"]
    assert said.count("step 6: saved in") == said.count("done: loss") == said.count("2 ranks train together") == 1
    assert said.count("before training, sample: one") == 2, "the last sample is shown below it"
    assert stored(out / "report.json")["steps"] == 6
    assert (out / "data/manifest.json").exists()
    shutil.copytree(out / "checkpoints", tmp_path / "ended/checkpoints")
    assert train(tmp_path / "ended", *OPTIONS[len(SMALL) :]) == 0, "one process goes on from it"
    assert weights(tmp_path / "ended") == weights(out)


@pytest.mark.exhaustive
def test_a_killed_rank_costs_no_bit(trained, tmp_path, text):
    out = tmp_path / "run"
    process = started(out, text, "--sample-prompt", "one", restarts=2)
    wait_for_step(process, out, 3)
    os.kill(ranks_of(process)[1], signal.SIGKILL)
    _, said = process.communicate()
    assert process.returncode == 0, said
    assert "going on from" in said
    assert_same_run(out, trained[0])


@pytest.mark.exhaustive
@pytest.mark.parametrize("rank", [None, 0, 1])  # None: torchrun, which passes it to all
def test_a_signal_to_one_rank_stops_all_and_the_same_command_goes_on(trained, tmp_path, text, rank):
    out = tmp_path / "run"
    process = started(out, text, "--sample-prompt", "one")
    wait_for_step(process, out, 2)
    os.kill(process.pid if rank is None else ranks_of(process)[rank], signal.SIGTERM)
    _, said = process.communicate()
    assert said.count("stopped by") == 1 and (rank is None or "exitcode  : 75" in said), said
    assert process.returncode == 1 or rank is None, "torchrun's own"
    done = len(read_metrics(out / "metrics.jsonl"))
    assert (out / f"checkpoints/step-{done:08d}/manifest.json").exists()
    process = started(out, text, "--sample-prompt", "one")
    assert process.communicate() and process.returncode == 0
    assert_same_run(out, trained[0])


@pytest.mark.exhaustive
def test_a_refusal_is_said_once(tmp_path, text):
    process = started(tmp_path / "run", text, "--weights", "streamed")
    _, printed = process.communicate()
    assert process.returncode == 1 and "exitcode  : 2" in printed
    assert printed.count("train_gpt2_large.py: ") == printed.count("train_gpt2_large.py: --weights streamed:") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("options", "said"), [
    ({"states": "disk", "states_folder": "."}, "--states disk"), ({"weights": "streamed"}, "--weights streamed"),
    ({"group": 2}, "--group"), ({"model": T5Config()}, "encoder-decoders"),
])  # fmt: skip
def test_what_ranks_cannot_do_is_refused_by_name(options, said):
    config = options.get("model", GPT2Config())
    settings = Settings(batch=12, **options | {"model": "a model"})
    with pytest.raises(InputError, match=said):
        of_one_rank(Question(settings, config, "fp32", None), Mesh(2), 2)


@pytest.mark.parametrize(("batch", "micro_batch", "rows"), [(12, None, 6), (13, None, 7), (12, 4, 8), (12, 12, 12)])
def test_the_plan_is_for_the_rank_with_the_most_rows(batch, micro_batch, rows):
    settings = Settings(batch=batch, micro_batch=micro_batch, ram_limit_bytes=GIB)
    question = Question(settings, GPT2Config(), "fp32", None)
    share = of_one_rank(question, Mesh(2), 2).settings
    assert (share.batch, share.ram_limit_bytes, share.weights) == (rows, GIB // 2, "resident")
    assert of_one_rank(question, Mesh(), 1) == question


@pytest.mark.parametrize(("ranks", "saved", "rows"), [(3, 22, 22), (3, 4, 24), (1, 4, 64), (1, None, 64)])
def test_a_run_goes_on_with_its_micro_batch_also_if_that_does_not_divide_the_whole_batch(ranks, saved, rows):
    """Seen to fail: 3 ranks chose micro-batches of 22 for a batch of 64, and could not resume."""
    asked = []

    def make(question: Question):
        asked.append((question.settings.batch, question.settings.micro_batch))
        return plan

    settings = Settings(batch=64)
    plan = make_plan(Question(Settings(batch=2, seq=8), GPT2Config(n_layer=1, n_embd=8, n_head=1), "fp32", None))
    plan = replace(plan, settings=replace(settings, batch=rows, micro_batch=saved))
    found = plan_of_ranks(Question(settings, GPT2Config(), "fp32", None), meshes(ranks, 1), ranks, make, saved)
    assert asked == [(rows, saved)] and found.settings.batch == 64


@pytest.mark.exhaustive
def test_two_machines_of_two_ranks_each_store_the_model_once_on_each(trained, tmp_path, text):
    """Machines by name only: two of torchrun's agents, which meet at a port of this one."""
    out = tmp_path / "run"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    where = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(port), "--node-rank"]
    agents = [started(out, text, meeting=[*where, str(number)]) for number in range(2)]
    said = [agent.communicate()[1] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], said
    plan = stored(out / "plan.json")
    assert (plan["ranks"], plan["ranks_that_share_a_model"]) == (4, 2)
    assert sum("4 ranks train together, and each machine stores the model" in each for each in said) == 1
    assert stored(out / "checkpoints/step-00000006/state.json")["sharing"] == 2
    for row, of_two in zip(loss_rows(out), loss_rows(trained[0]), strict=True):
        assert row["loss"] == pytest.approx(of_two["loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("gpus", "machines", "fits", "tried"),
    [
        (2, 1, 2, [(2, 1)]),
        (2, 3, 2, [(2, 3)]),
        (2, 3, 6, [(2, 3), (6, 1)]),  # a machine is too small
        (1, 3, 3, [(3, 1)]),  # sends as much as three replicas, and takes less
        (2, 3, 9, [(2, 3), (6, 1)]),
    ],
)
def test_a_machine_stores_the_model_once_if_it_fits(gpus, machines, fits, tried):
    asked = []

    def make(question: Question):
        asked.append((question.mesh.sharing, question.mesh.replicas))
        if question.mesh.sharing < fits:
            raise PlanError("It does not fit.", [{"options": "--ram-limit 1MiB"}])
        raise KeyboardInterrupt  # a plan, which this test has no use for

    question = Question(Settings(batch=12, ram_limit_bytes=GIB), GPT2Config(), "fp32", None)
    with pytest.raises(PlanError if fits > gpus * machines else KeyboardInterrupt):
        plan_of_ranks(question, meshes(gpus * machines, machines), gpus, make)
    assert asked == tried


def test_who_shares_a_model_is_not_decided_by_what_else_runs_here_and_stays():
    """The bits depend on it. Seen to fail: a lower --ram-limit, or other programs, changed it in a run that went on."""

    def make(question: Question):
        raise PlanError("30 GiB of RAM are needed in this plan, and 20 are free here.")

    question = Question(Settings(batch=12), GPT2Config(), "fp32", None)
    with pytest.raises(PlanError, match="free here"):
        plan_of_ranks(question, meshes(4, 2), 2, make)
    assert [mesh.sharing for mesh in meshes(4, 2, sharing=4)] == [4]
    assert [mesh.sharing for mesh in meshes(4, 2, sharing=2)] == [2]
    assert [mesh.sharing for mesh in meshes(4, 2, sharing=8)] == [2, 4], "other machines than those before"
    assert meshes(3, 2, alike=False) == [Mesh(3, machines=2)]


LOOP = """
import sys, torch, warnings
import lowmem
warnings.simplefilter("ignore")
settings = lowmem.Settings(model="gpt2-demo", init="random", seq=16, batch=4, micro_batch=1, device="cpu")
def batch(number):
    tokens = torch.randint(0, 256, (4, 16), generator=torch.Generator().manual_seed(number))
    return {"input_ids": tokens, "labels": tokens.clone()}
model = lowmem.load(settings, resume=sys.argv[1])
losses = [model.step(batch(number), number, learning_rate=1e-3).loss for number in range(model.done, 3)]
losses.append(model.evaluate([batch(9)]))
model.save(sys.argv[1], 3)
lowmem.export(model, sys.argv[1] + "/model")
if model.step.store.ranks.rank == 0:
    print(losses)
"""


@pytest.mark.exhaustive
def test_a_loop_of_one_s_own_trains_on_two_ranks(tmp_path):
    (tmp_path / "loop.py").write_text(LOOP)
    launchers = {"one": [], "two": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]}
    losses = {}
    for name, launcher in launchers.items():
        losses[name] = json.loads(python(*launcher, tmp_path / "loop.py", tmp_path / name).stdout)
        assert (tmp_path / name / "model/model.safetensors").exists()
    assert losses["two"] == pytest.approx(losses["one"], rel=1e-6) and len(losses["one"]) == 4


LOAD = """
import json, resource, sys
import lowmem
from lowmem.limits import ram_now_bytes
import lowmem.run.prepare
before = ram_now_bytes()
model = lowmem.load(lowmem.Settings(model=sys.argv[1], seq=16, batch=4, micro_batch=1, device="cpu"))
grown = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
open(sys.argv[2] + f"/{model.step.store.ranks.rank}.json", "w").write(json.dumps(grown))
"""


@pytest.mark.exhaustive
def test_a_rank_that_loads_takes_its_share_of_weights_and_states(tmp_path):
    """And twice the gathered embeddings, which FSDP2 copies. 61 million parameters in a file, fp32 on the CPU."""
    config = GPT2Config(n_layer=8, n_embd=768, n_head=12, n_positions=64, vocab_size=5_000)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "model")
    ByT5Tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "load.py").write_text(LOAD)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", RANKS]
    python(*launcher, "load.py", "model", ".", cwd=tmp_path, OMP_NUM_THREADS="1")
    whole, embeddings = 12 * model.num_parameters(), 4 * config.vocab_size * config.n_embd
    grown = [stored(tmp_path / f"{rank}.json") for rank in range(RANKS)]
    assert max(grown) < whole / RANKS + 2 * embeddings + 96 * MIB < 0.8 * whole
    assert min(grown) > whole / RANKS


OTHER_RANK = """
import os, sys, time
sys.path[:0] = [{root!r}]
from lowmem.run import prepare
from lowmem.run.main import main
from train_gpt2_large import SETTINGS

load = prepare.load_newest


def slow(*arguments, **named):
    loaded = load(*arguments, **named)
    time.sleep(0.5)
    return loaded


if os.environ["RANK"] == "1":
    {difference}
if __name__ == "__main__":
    sys.exit(main(SETTINGS))
"""


def different(difference: str, folder: Path, out: Path, text: Path, *options: str) -> tuple[int, str]:
    """Runs ranks of which the second one is different. Returns the exit code and what was printed."""
    (folder / "train.py").write_text(OTHER_RANK.format(root=str(ROOT), difference=difference))
    command = [str(folder / "train.py"), *OPTIONS, "--data", str(text), "--out", str(out), *options]
    process = start(command, RANKS, stderr=subprocess.PIPE)
    _, said = process.communicate()
    return process.returncode, said


@pytest.mark.exhaustive
def test_ranks_that_have_read_different_weights_are_refused(tmp_path, text):
    """Seen to fail: they trained."""
    other = "read = prepare.initial_weights; prepare.initial_weights = lambda *of: ((n, w + 1) for n, w in read(*of))"
    code, said = different(other, tmp_path, tmp_path / "out", text)
    assert code and said.count("have read different weights of") == 1


@pytest.mark.exhaustive
def test_ranks_that_have_read_different_texts_are_refused(tmp_path, text):
    """Seen to fail: they trained."""
    (tmp_path / "other").mkdir()
    for path in text.iterdir():
        (tmp_path / "other" / path.name).write_text(path.read_text().replace("square", "powers"))
    other = f"sys.argv[sys.argv.index('--data') + 1] = {str(tmp_path / 'other')!r}"
    code, said = different(other, tmp_path, tmp_path / "out", text)
    assert code and said.count("have read different data") == 1


@pytest.mark.exhaustive
def test_a_finished_run_is_extended_also_if_one_rank_loads_slowly(trained, tmp_path, text):
    """Seen to fail: the slow one found the settings of the longer run, and that this was finished already."""
    out = tmp_path / "run"
    shutil.copytree(trained[0], out)
    slow = "prepare.load_newest = slow"
    code, said = different(slow, tmp_path, out, text, "--steps", "8", "--schedule", "constant")
    assert code == 0 and stored(out / "report.json")["steps"] == 8, said


def test_a_rank_whose_neighbour_has_ended_says_so_in_a_sentence():
    lost = RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Connection closed by peer")
    said = _in_a_sentence(lost, Settings())
    assert str(said).startswith("another rank has ended") and said.exit_code == 1
    assert _in_a_sentence(RuntimeError("a mistake"), Settings()) is None
