"""What an experiment cannot do is refused in a sentence, with exit code 2, before anything is written or started."""

import importlib
import sys

import pytest
import torch

from experiments.bigger_models import recipe, train_gptj
from experiments.code_generation import compare
from experiments.harness import group
from experiments.harness.options import exit_code_of, without_options
from experiments.harness.rows import ROOT
from experiments.memory_estimation import run as memory_estimation
from experiments.nested_tensors import main as nested_tensors
from experiments.parallel_3d import run as parallel_3d
from experiments.peers import run as peers
from experiments.pipeline_parallel import run as pipeline_parallel
from experiments.tensor_parallel import run as tensor_parallel
from experiments.unified_memory import run_gpt2

CODE = "--shape 1x32x2 --vocabulary 300 --steps 2 --batch 2 --seq 48 --new-tokens 8 --prefixes 3 --held-out-bytes 30KB"
PROGRAMS = {  # the function, and words before those of a case
    "bigger_models": (lambda words: recipe.main("gpt-j-6b", train_gptj.SETTINGS, words), ""),
    "code_generation": (compare.main, f"{CODE} --train-bytes 3MB"),
    "memory_estimation": (memory_estimation.main, ""),
    "nested_tensors": (nested_tensors.main, ""),
    "parallel_3d": (parallel_3d.main, ""),
    "peers": (peers.main, "--model gpt2-demo --device cpu --seq 32"),
    "pipeline_parallel": (pipeline_parallel.main, ""),
    "tensor_parallel": (tensor_parallel.main, ""),
    "unified_memory": (run_gpt2.main, "--model 2x64x4"),
}


@pytest.mark.parametrize(
    "program, words, said",
    [
        ("bigger_models", "--wrong 3", "Unknown option --wrong"),
        ("bigger_models", "--blocks 2 --wrong 3", "Unknown option --wrong"),
        ("bigger_models", "--blocks 29", "28 blocks"),
        ("bigger_models", "--blocks 0", "invalid whole number of at least 1 value: '0'"),
        ("bigger_models", f"--blocks 1 --out {__file__}/run", "cannot be written"),
        ("bigger_models", "--blocks 2 --model gpt2", "--model gpt2 names another model"),
        ("bigger_models", "--blocks 2 --demo", "names another model"),
        ("code_generation", "--after x", "--after needs --before"),
        ("code_generation", "--seq 32 --new-tokens 32", "leaves nothing of --seq 32"),
        ("code_generation", "--shape 2x64x5", "BLOCKSxWIDTHxHEADS"),
        ("code_generation", "--data missing-file", "no such file or folder"),
        ("code_generation", "--held-out-bytes 3GBs", "--held-out-bytes"),
        ("code_generation", "--device cuda", "finds no CUDA device"),
        ("code_generation", "--lr -1", "--lr -1 must be more than 0"),
        ("code_generation", "--lr nan", "--lr"),
        (
            "code_generation",
            "--before /nonexistent --after /nonexistent",
            "'/nonexistent' is neither a folder here nor a name",
        ),
        ("code_generation", f"--rows {__file__}/rows.jsonl", "rows.jsonl cannot be written"),
        ("code_generation", "--rows .", "--rows . cannot be written"),
        ("memory_estimation", "--only gpt5", "gpt5"),
        ("memory_estimation", "--limit 16GBs", "GBs"),
        ("memory_estimation", "--gpu abacus", "abacus"),
        ("memory_estimation", "--measure", "GPU"),
        ("memory_estimation", "--seq 0", "whole number"),
        ("nested_tensors", "--use_nested --mode packed", "--use_nested and --mode packed name two modes"),
        ("nested_tensors", "--num_samples 0", "invalid whole number of at least 1 value: '0'"),
        ("nested_tensors", "--num_samples 99999999", "lines in the standard library, and not 99,999,999"),
        ("nested_tensors", "--batch_size x", "invalid whole number of at least 1 value: 'x'"),
        ("nested_tensors", "--device cuda", "--device cuda: there is no such GPU here"),
        ("nested_tensors", "--device meta", "--device meta: neither cpu nor cuda"),
        ("nested_tensors", "--num_workers -1", "invalid whole number of at least 0 value: '-1'"),
        ("nested_tensors", "--device gpu", "--device gpu: neither cpu nor cuda"),
        ("nested_tensors", "--data no/such", "no/such is neither in the cache nor to be had from the hub"),
        ("nested_tensors", "--data wikitext", "wikitext-2-raw-v1 is neither in the cache nor to be had from the hub"),
        ("parallel_3d", "--pp 3 --processes 8", "3 stages of 2 parts are 6 processes, which do not divide 8"),
        ("parallel_3d", "--dp 3 --processes 8", "a mesh of 2 x 3 x 2 has 12 processes, and not 8"),
        ("parallel_3d", "--pp 9 --tp 1 --dp 1", "8 layers with embedding and head, which make no 9 stages"),
        ("parallel_3d", "--tp 9", "the model has 8 heads: 9 ranks are more"),
        ("parallel_3d", "--tp 8 --model llama", "4 heads of keys and values: 8 ranks are more"),
        ("parallel_3d", "--dp 8", "--batch 16 has no sample for each of 4 micro-batches of 8 replicas"),
        ("parallel_3d", "--seq 65", "--seq 65 is longer than the 64 positions"),
        ("parallel_3d", "--model llama --shape gpt2", "gpt2 is of type gpt2, and --model is llama"),
        ("parallel_3d", "--shape no/such/config.json", "no/such/config.json"),
        ("parallel_3d", "--dp 0", "invalid whole number of at least 1 value: '0'"),
        ("parallel_3d", "--schedule pipedream", "invalid choice: 'pipedream'"),
        ("parallel_3d", "--micro-batches 300000 --batch 600000", "400,000 micro-batches times stages at most"),
        ("peers", "--ram-limit 16GBs", "--ram-limit"),
        ("peers", "--steps 1", "--steps 1 is too few"),
        ("peers", "--batch 0", "--batch"),
        ("peers", "--seq 5000", "--seq 5000"),
        ("peers", "--peer plian", "plian"),
        ("pipeline_parallel", "--chunks 2", "1f1b has one stage per rank, and not 2 chunks"),
        ("pipeline_parallel", "--stages 11", "the model has 10 layers, which make no 11 stages"),
        ("pipeline_parallel", "--stages 0", "invalid whole number of at least 1 value: '0'"),
        ("pipeline_parallel", "--batch 3", "--batch 3 has no sample for each of 8 micro-batches"),
        ("pipeline_parallel", "--schedule pipedream --clip 1", "--clip needs the gradients of all stages at once"),
        ("pipeline_parallel", "--schedule pipedream --steps 100000", "a schedule has 400,000 at most of both"),
        ("pipeline_parallel", "--seed 99999999999", "less than 2147483648 value: '99999999999'"),
        ("pipeline_parallel", f"--out {__file__}", f"--out {__file__} cannot be written: File exists"),
        ("pipeline_parallel", "--pad inf", "invalid number of at least 0"),
        ("pipeline_parallel", "--task cifar10", "CIFAR-10 is neither in the cache nor to be had from the hub"),
        ("tensor_parallel", "--ranks 7", "the model has 6 heads: 7 ranks are more; --ranks 6 is the most"),
        ("tensor_parallel", "--ranks 5 --model llama", "4 heads of keys and values: 5 ranks are more"),
        ("tensor_parallel", "--ranks 3 --sequence-parallel", "a length that 3 ranks divide, and --seq is 64"),
        ("tensor_parallel", "--model mlp --sequence-parallel", "mlp has no sequence"),
        ("tensor_parallel", "--model mlp --weights x", "--weights and --shape are for gpt2 and llama"),
        ("tensor_parallel", "--model mlp --save", "which has no mlp"),
        ("tensor_parallel", "--compare --dropout 0.1", "use --dropout 0"),
        ("tensor_parallel", "--dropout 1", "number of at least 0 and less than 1 value: '1'"),
        ("tensor_parallel", "--weights no/such/folder", "no/such/folder"),
        ("tensor_parallel", "--model llama --shape gpt2", "gpt2 is of type gpt2, and --model is llama"),
        ("tensor_parallel", "--weights x --shape gpt2", "leave out --shape"),
        ("tensor_parallel", "--model resnet --ranks 65", "resnet has layers of 64 features: --ranks 64 is the most"),
        ("tensor_parallel", "--model mlp-norm --batch 1", "--batch 2 is the least for mlp-norm"),
        ("tensor_parallel", "--model mlp --seq 32", "mlp sees images"),
        ("tensor_parallel", "--seq 129", "--seq 129 is longer than the 128 positions"),
        ("unified_memory", "--prompt x --generate 3", "give both"),
        ("unified_memory", "--physical-limit 1MiB", "less than one layer needs"),
        ("unified_memory", "--generate 3 --backward", "--generate has no backward"),
        ("unified_memory", "--enable-prefetch --placement explicit", "--enable-prefetch is for managed memory"),
        ("unified_memory", "--backward --placement explicit", "streams forwards alone"),
        ("unified_memory", "--seq 1025", "longer than the 1024 positions"),
        ("unified_memory", "--seq 1000 --generate 25", "--generate 25 behind 1000 tokens is more than"),
        ("unified_memory", "--model 2x64x5", "5 heads do not divide a width of 64"),
        ("unified_memory", "--model gpt2-huge", "gpt2-small"),
        ("unified_memory", "--device cuda", "PyTorch sees no GPU here"),
        ("unified_memory", "--physical-limit 3", "--physical-limit"),
        ("unified_memory", "--num-streams 2", "give --enable-prefetch"),
        ("unified_memory", "--backward --seq 1", "give --seq 2 or more"),
        ("unified_memory", "--weights somewhere", "give one of them"),
        ("nested_tensors", f"--out {__file__}", "cannot be written"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_written(program, words, said, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(peers, "machine_here", lambda: {"names": {"cpu": "the CPU"}, "versions": {"python": "3"}})
    monkeypatch.setattr(group, "_started", lambda *_: pytest.fail("a process"))
    monkeypatch.chdir(tmp_path)
    main, before = PROGRAMS[program]
    try:
        code = main([*before.split(), "--out", "out", *words.split()])
    except SystemExit as ended:
        code = ended.code
    assert code == 2 and said in " ".join(capsys.readouterr().err.split())
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    "program, words, said",
    [
        ("bench.run", "--only dancing", "--only dancing: no case has that in its name; there are plan"),
        ("bench.run", "--only load --before no-such-commit", "no-such-commit: fatal"),
        ("bench.run", "--rounds 0", "invalid whole number of at least 1 value: '0'"),
        ("bench.run", "--out {}", "cannot be written"),
        ("bench.threads", "--steps 0", "invalid whole number of at least 1 value: '0'"),
        ("bench.threads", "--out {}", "cannot be written"),
        ("bigger_models.measure", "--only nope --out out", "nope: no case here has that in its name; there are "),
        ("bigger_models.plans", "--only nope --out out", "nope: no case has that in its name; --list names them"),
        ("gpu_acceptance.predicted", "--gpus h200 abacus", "abacus"),
        ("gpu_acceptance.predicted", "--out {}", "cannot be written"),
        ("memory_estimation.ram", "--out {}", "cannot be written"),
        ("memory_estimation.run", "--out {}", "cannot be written"),
        ("memory_estimation.several_gpus.published", "--out {}", "cannot be written"),
        ("memory_estimation.several_gpus.methods", "--model gpt2 --gpu h200 --gpus 0", "at least 1, and not 0"),
        ("memory_estimation.several_gpus.methods", "--model gpt2 --machines 2", "--machines is for lowmem plan"),
        ("nested_tensors.eval", "--rows {}", "cannot be written"),
        ("nested_tensors.memory", "--out {}", "cannot be written"),
        ("nested_tensors.time_profiling", "--rows {}", "cannot be written"),
        ("parallel_3d.measure", "--matching dancing", "--matching dancing: no command line has that in it"),
        ("parallel_3d.measure", "--rows {}", "cannot be written"),
        ("peers.update", "--out {}", "cannot be written"),
        ("peers.update", "--parameters 1000000000000 --out out", "give at most"),
        ("plan_accuracy.run", "--every 0", "invalid whole number of at least 1 value: '0'"),
        ("plan_accuracy.run", "--only dancing", "--only dancing: no case has that in its name; --list names them"),
        ("plan_accuracy.run", "--out {}", "cannot be written"),
        ("several_gpus.killed", "--rows {}", "cannot be written"),
        ("unified_memory.measure", "--case zzz --rows rows.jsonl", "--case zzz: no case of"),
        ("unified_memory.measure", "--only traffic --rows {}", "cannot be written"),
    ],
)
def test_a_measurement_is_refused_before_its_work(program, words, said, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    main = importlib.import_module(f"experiments.{program}").main
    try:
        code = exit_code_of(lambda: main(words.format(f"{__file__}/rows.jsonl").split()))
    except SystemExit as ended:
        code = ended.code
    assert code == 2 and said in " ".join(capsys.readouterr().err.split())
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("word, code", [("--help", 0), ("--rows", 2)])
def test_a_command_without_options_refuses_words_before_it_writes(word, code, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["table.py", word])
    with pytest.raises(SystemExit) as ended:
        without_options("experiments.bench.table", "Tables.", lambda: pytest.fail("it began"))
    assert ended.value.code == code


def test_a_program_says_its_errors_and_ctrl_c_in_a_sentence():
    """All but those that only other programs start, and those whose `main` does so itself."""
    own = {"bigger_models/train_gptj", "bigger_models/train_t5", "bigger_models/on_card", "gpu_acceptance/__main__"}
    own |= {"harness/child", "bench/cases", "plan_accuracy/cell", "peers/attempt", "memory_estimation/measure"}
    folder, missing = ROOT / "experiments", set()
    for path in folder.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        started = text.partition('if __name__ == "__main__":')[2]
        if started and "exit_code_of(" not in text and "sys.exit(without_options(" not in started:
            missing.add(path.relative_to(folder).with_suffix("").as_posix())
    assert missing == own
