"""The command line, the --config file and settings.json: what a user writes becomes Settings or one clear sentence."""

import dataclasses
import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowmem.errors import InputError
from lowmem.fields import option_name
from lowmem.run.cli import TRAIN, parse_arguments, parse_plan
from lowmem.run.options import ALIASES, FLAGS, NAMES, REFUSED, SPECIAL_ALIASES, SYNONYMS, TITLES
from lowmem.settings import DEMO, FIELD_NAMES, TRACKERS, Settings
from lowmem.units import GIB, MIB

LARGE = Settings(model="gpt2-large")
XL = Settings(model="gpt2-xl", ram_limit_bytes=16 * GIB)


def parse(*argv: str, defaults: Settings = LARGE) -> Settings:
    return parse_arguments(list(argv), defaults)


def refusal(*argv: str) -> str:
    with pytest.raises(InputError) as error:
        parse(*argv)
    assert error.value.exit_code == 2
    message = str(error.value)
    assert "\n" not in message and message[-1] in ".?", message
    return message


# Options and defaults


def test_without_options_the_script_decides_and_its_defaults_are_the_contracts():
    assert parse() == LARGE and parse(defaults=XL) == XL
    assert (LARGE.data, LARGE.init, LARGE.seq, LARGE.batch, LARGE.optimizer) == (
        *("python-stdlib", "pretrained", 1024, 64, "adamw"),
    )
    assert (LARGE.gpu_limit_bytes, LARGE.ram_limit_bytes, LARGE.resume, LARGE.wandb) == (11 * GIB, None, "auto", None)


def test_every_setting_is_an_option_and_no_name_means_two_things():
    assert {field for _, field, _ in OPTION_VALUES} | {"demo"} == set(FIELD_NAMES), (
        "the table of values has every field"
    )
    assert {*ALIASES, *SYNONYMS, *TITLES} <= set(FIELD_NAMES)
    names = [name for field in FIELD_NAMES for name in (option_name(field)[2:], *ALIASES.get(field, "").split())]
    names += [*SPECIAL_ALIASES, *REFUSED, "config", "help"]
    assert sorted(names) == sorted(set(names))


def test_help_shows_every_option_with_the_scripts_default_and_no_alias(capsys):
    with pytest.raises(SystemExit) as stopped:
        parse("--help", defaults=dataclasses.replace(XL, sample_prompt="100%"))
    assert stopped.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for name in FIELD_NAMES:
        assert f" {option_name(name)} " in text
    for shown in ("(default: gpt2-xl)", "(default: 16.0 GiB)", "(default: 11.0 GiB)", "(default: 3e-05)", "100%"):
        assert shown in text
    for hidden in ("--max-steps", "--max_steps", "--learning-rate", "--weight_decay", "--bf16", "--batch-size"):
        assert hidden not in text


def test_help_breaks_no_word_on_a_narrow_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    with pytest.raises(SystemExit):
        parse("--help")
    words = set(capsys.readouterr().out.replace("(default:", "").split())
    for text in (TRAIN["epilog"], *(item.metadata["help"] for item in dataclasses.fields(Settings))):
        assert set(text.split()) <= words


TYPED = {  # fields, and what is typed for them; the value is that of this type
    str: "model=gpt2 init=random data=org/name:config eval_data=held.jsonl split=train_sft text_field=content "
    "prompt_field=question completion_field=answer messages_field=dialog train_on=all pack=packed schedule=linear "
    "save_every=2h optimizer=adamw8bit precision=fp16 residual=16bit device=cpu recompute=off states=streamed "
    "states_folder=/fast/disk weights=streamed boundaries=streamed gradients=streamed gpu=t4 out=there run_name=mine "
    "resume=never resume=runs/x export_dtype=bf16 sample_prompt=def report_to=tensorboard,wandb wandb=offline",
    int: "max_samples=100 seq=512 batch=8 steps=3 seed=7 micro_batch=4 group=16 segment_blocks=4 target_tokens=128 "
    "preview=3 save_every=10 keep_last=1 eval_every=5 eval_batches=3 log_every=10 sample_every=5 patience=3",
    float: "eval_fraction=0.1 eval_fraction=0 epochs=0.5 lr=1e-4 warmup_steps=0.1 warmup_steps=100 weight_decay=0 "
    "adam_beta1=0.8 adam_beta2=0.95 adam_epsilon=1e-6 clip_norm=0.5 sample_temperature=0.7",
}
OPTION_VALUES = [
    (f"--{field.replace('_', '-')} {text}", field, kind(text))
    for kind, pairs in TYPED.items()
    for field, text in (pair.split("=") for pair in pairs.split())
]
OPTION_VALUES += [
    ("--data a.txt --data b.txt=2 --data a.txt", "data", ("a.txt", "b.txt=2", "a.txt")),
    ("--train-file a.txt --train_file b.txt", "data", ("a.txt", "b.txt")),
    ("--eval-data held.jsonl --eval-data wikitext", "eval_data", ("held.jsonl", "wikitext")),
    ("--chat-template-path chat.jinja", "chat_template", "chat.jinja"),
    *[("--document-mask on", "document_mask", True), ("--document-mask off", "document_mask", False)],
    *[(f"--clip-norm {off}", "clip_norm", None) for off in ("0", "none", "None")],
    *[("--gpu-limit 800MiB", "gpu_limit_bytes", 800 * MIB), ("--gpu-limit none", "gpu_limit_bytes", None)],
    *[("--ram-limit 16G", "ram_limit_bytes", 16 * GIB), ("--ram-limit none", "ram_limit_bytes", None)],
    ("--disk-rate 3GiB", "disk_rate_bytes", 3 * GIB),
    ("--network-rate 3GiB", "network_rate_bytes", 3 * GIB),
    *[(f"--{name.replace('_', '-')} auto", name, None) for name in ("micro_batch", "group", "segment_blocks")],
    *[(f"--{name.replace('_', '-')}", name, True) for name in ("fixed_batch", "plan_only", "verbose", "keep_best")],
]


@pytest.mark.parametrize(("line", "field", "value"), OPTION_VALUES)
def test_an_option_sets_its_field_and_nothing_else(line, field, value):
    name, *values = line.split()
    defaults = dataclasses.replace(LARGE, micro_batch=2, group=1, segment_blocks=1, ram_limit_bytes=GIB, batch=32)
    defaults = dataclasses.replace(defaults, eval_every=9, sample_prompt="a")  # what others have to do with
    if field in ("gradients", "boundaries"):  # which have the whole batch as one group
        defaults = dataclasses.replace(defaults, group=None)
    freed = {"micro_batch": None, "group": None} if field == "batch" else {}
    expected = dataclasses.replace(defaults, **{field: value}, **freed)
    underscored = "--" + name[2:].replace("-", "_")
    assert parse(name, *values, defaults=defaults) == expected
    assert parse(underscored, *values, defaults=defaults) == expected
    if len(values) == 1:
        assert parse(f"{underscored}={values[0]}", defaults=defaults) == expected


# Who comes from another trainer

ALIAS_VALUES = [
    *[("model_name_or_path gpt2", "model", "gpt2"), ("dataset_name wikitext", "data", "wikitext")],
    *[("train_file a.txt", "data", "a.txt"), ("validation_file b.txt", "eval_data", "b.txt")],
    *[(f"{name} 256", "seq", 256) for name in ("block_size", "max_length", "max_seq_length", "max_seq_len")],
    ("global_batch_size 8", "batch", 8),
    *[(f"{name} 9", "steps", 9) for name in ("max_steps", "max_iters")],
    *[("num_train_epochs 3", "epochs", 3.0), ("learning_rate 1e-5", "lr", 1e-5)],
    *[("lr_scheduler_type constant_with_warmup", "schedule", "constant"), ("warmup_ratio 0.1", "warmup_steps", 0.1)],
    *[("lr_scheduler linear", "schedule", "linear"), ("dataset_train_split train_sft", "split", "train_sft")],
    ("mixed_precision no", "precision", "fp32"),
    *[("cutoff_len 256", "seq", 256), ("val_size 0.1", "eval_fraction", 0.1), ("prompt a", "sample_prompt", "a")],
    *[("max_grad_norm 2", "clip_norm", 2.0), ("grad_clip 0.0", "clip_norm", None)],
    *[("optim adamw_torch", "optimizer", "adamw"), ("optim adamw_bnb_8bit", "optimizer", "adamw8bit")],
    ("optim paged_adamw_8bit", "optimizer", "adamw8bit"),  # the same numbers
    *[("dtype bfloat16", "precision", "bf16"), ("bf16", "precision", "bf16"), ("fp16 True", "precision", "fp16")],
    *[("use_cpu", "device", "cpu"), ("gpu_limit_bytes 1G", "gpu_limit_bytes", GIB)],
    *[("output_dir o", "out", "o"), ("out_dir o", "out", "o"), ("wandb_run_name r", "run_name", "r")],
    *[("resume_from_checkpoint d", "resume", "d"), ("resume_from_checkpoint True", "resume", "auto")],
    *[("save_steps 5", "save_every", 5), ("eval_steps 5", "eval_every", 5), ("save_total_limit 1", "keep_last", 1)],
    *[("wandb_log", "report_to", "wandb"), ("log_with all", "report_to", "all")],
    *[("logging_steps 5", "log_every", 5), ("eval_iters 5", "eval_batches", 5), ("dry_run", "plan_only", True)],
]


@pytest.mark.parametrize(("line", "field", "value"), ALIAS_VALUES)
def test_names_of_other_trainers_are_understood_with_dashes_and_underscores(line, field, value):
    name, *values = line.split()
    for spelling in (f"--{name}", "--" + name.replace("_", "-")):
        assert parse(spelling, *values) == dataclasses.replace(LARGE, **{field: value})


OTHERS_OPTIONS = {  # of trainers that people come from: what they type there
    "Hugging Face": "adam_beta2 group_by_length neftune_noise_alpha ddp_find_unused_parameters torch_compile tf32 "
    "label_smoothing_factor push_to_hub hub_model_id eval_strategy save_strategy logging_dir remove_unused_columns "
    "dataloader_num_workers use_liger_kernel do_train do_eval overwrite_output_dir max_train_samples cache_dir "
    "tokenizer_name config_name full_determinism data_seed auto_find_batch_size lr_scheduler_kwargs torch_dtype",
    "TRL": "attn_implementation trust_remote_code assistant_only_loss completion_only_loss packing dataset_num_proc "
    "lora_alpha model_revision",
    "nanoGPT": "decay_lr min_lr lr_decay_iters compile dropout bias n_layer always_save_checkpoint init_from wandb_log",
    "LLaMA-Factory": "stage template cutoff_len finetuning_type flash_attn val_size neat_packing max_samples",
    "axolotl": "sequence_len val_set_size sample_packing train_on_inputs micro_batch_size adapter flash_attention",
    "litgpt": "precision devices num_nodes global_batch_size micro_batch_size lr_warmup_steps max_norm",
    "torchtune": "tokenizer enable_activation_checkpointing shuffle seed compile",
}


@pytest.mark.parametrize("trainer", OTHERS_OPTIONS)
def test_what_is_typed_elsewhere_is_understood_or_refused_and_never_guessed(trainer):
    for name in OTHERS_OPTIONS[trainer].split():
        if name.replace("_", "-") not in NAMES:
            assert f"--{name}" in refusal(f"--{name}", "1")
    assert not NAMES.keys() & REFUSED.keys()


@pytest.mark.parametrize(
    "typed", ["--early_exit_loss", "--pad_to_multiple_of", "--logits_to_keep", "--ema", "--rl", "--zzzzzzzz", "train"]
)
def test_what_is_far_from_any_option_is_named_and_not_guessed(typed):
    said = refusal(typed)
    assert typed in said and "did you mean" not in said and "the nearest" not in said


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_names_that_mean_something_else_are_refused_with_the_reason(name):
    for spelling in (f"--{name}", "--" + name.replace("-", "_")):
        for argv in ([spelling], [spelling, "8"], [f"{spelling}=8"]):
            message = refusal(*argv)
            assert message == f"{spelling} is not an option here: {REFUSED[name]}."


def test_the_reason_names_what_to_use_instead():
    advice = {"batch-size": "--batch ", "torch-dtype": "--precision", "offload-folder": "--states-folder"}
    advice |= {"max-train-samples": "--max-samples", "summary-column": "--completion-field", "lora": "--gpu-limit"}
    advice |= {"gradient-checkpointing": "--recompute", "load-in-4bit": "adamw8bit", "load-in-8bit": "adamw8bit"}
    assert all(option in REFUSED[name] for name, option in advice.items())


@pytest.mark.parametrize(
    ("line", "batch", "micro_batch", "said"),
    [
        # Hugging Face's Trainer
        ("--per_device_train_batch_size 2", 2, None, "--per_device_train_batch_size 2: an optimizer step has 2 seq"),
        (
            "--per_device_train_batch_size 2 --gradient_accumulation_steps 8", 16, None,
            "--per_device_train_batch_size 2 x --gradient_accumulation_steps 8: an optimizer step has 16 sequences "
            "(--batch 16)",
        ),
        ("--per-device-train-batch-size=4 --gradient-accumulation-steps=4 --batch 16", 16, None, "16 sequences"),
        # axolotl, litgpt
        ("--micro_batch_size 2 --gradient_accumulation_steps 8", 16, 2, "16 sequences"),
        ("--micro_batch_size 2 --global_batch_size 64", 64, 2, ""),
        ("--micro-batch 2 --accumulate-grad-batches 3", 6, 2, "--micro-batch 2 x --accumulate-grad-batches 3: "),
        ("--micro-batch 2", 64, 2, ""),
    ],
)  # fmt: skip
def test_options_that_make_a_batch_elsewhere_make_the_same_batch_here(line, batch, micro_batch, said, capsys):
    made = parse_arguments(line.split(), LARGE)
    assert made == dataclasses.replace(LARGE, batch=batch, micro_batch=micro_batch)
    heard = capsys.readouterr().err
    assert said in heard and len(heard.splitlines()) == bool(said)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--gradient_accumulation_steps 8", "--gradient_accumulation_steps 8 multiplies sequences that run at once"),
        ("--gradient_accumulation_steps 8 --batch 16", "give --batch in its place"),
        ("--micro_batch_size 2", "--micro_batch_size 2 alone does not say how many sequences an optimizer step has"),
        ("--per_device_train_batch_size 2 --batch 64", "is a batch of 2, and --batch 64 is another one"),
        ("--per_device_train_batch_size 2 --micro_batch_size 2 --batch 2", "give it once"),
        ("--micro-batch 4 --micro_batch_size 2 --batch 8", "give it once"),
        ("--per_device_train_batch_size 0", "it must be at least 1"),
        ("--gradient_accumulation_steps x", "'x' is not a whole number"),
        ("--lr_scheduler_type constant", "'constant' has no warm-up there; give --schedule constant"),
    ],
)
def test_what_would_be_another_run_than_elsewhere_is_refused(line, said):
    assert said in refusal(*line.split())


def test_a_typed_batch_replaces_the_file_s_whatever_makes_it(tmp_path):
    multiplied = config(tmp_path, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8})
    whole = config(tmp_path, {"global_batch_size": 64}, "whole.json")
    assert parse(*multiplied).batch == 16
    assert parse(*multiplied, "--batch", "4").batch == 4
    assert parse(*multiplied, "--per_device_train_batch_size", "4").batch == 32
    assert parse(*whole, "--per_device_train_batch_size", "4").batch == 4


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        *[("--step", "--steps"), ("--sqe", "--seq"), ("--gpu-limt", "--gpu-limit"), ("--batch_sizes", "--batch-size")],
        *[("-lr", "--lr"), ("--warmup", "--warmup-"), ("--learning_rat", "--learning-rate (the same as --lr)")],
        *[("--micro", "--micro-batch"), ("--confg", "--config"), ("--optimiser", "--optimizer")],
    ],
)
def test_a_misspelt_option_is_answered_with_the_nearest(typed, meant):
    for argv in ([typed, "3"], [f"{typed}=3"], ["--seq", "64", typed]):
        message = refusal(*argv)
        assert f"option {typed}" in message and meant in message


# Conflicts


@pytest.mark.parametrize(
    "line", ["--steps 5 --max_steps 6", "--learning-rate 1 --lr 2", "--bf16 --fp16", "--bf16 --precision fp32"]
)
def test_two_spellings_that_disagree_are_refused(line):
    assert "different values" in refusal(*line.split())


def test_two_spellings_that_agree_and_one_option_typed_again_are_not():
    assert parse("--steps", "5", "--max_steps", "5").steps == 5
    assert parse("--keep-last", "5", "--keep_last", "6").keep_last == 6


@pytest.mark.parametrize(("line", "names"), [
    ("--steps 5 --epochs 1", ["--steps", "--epochs"]), ("--batch 10 --micro-batch 4", ["--batch 10", "--micro-batch"]),
    ("--batch 4 --micro-batch 8", ["--batch 4", "--micro-batch"]),
    ("--batch 8 --micro-batch 4 --group 4", ["--group 4", "2"]),
    ("--batch 12 --micro-batch 2 --group 4", ["--group 4", "6"]), ("--batch 8 --group 16", ["--group 16"]),
    ("--gradients streamed --states resident", ["--gradients streamed", "leave out --states resident"]),
    ("--gradients streamed --clip-norm 0", ["--gradients streamed", "leave out --clip-norm 0"]),
    ("--gradients streamed --batch 8 --micro-batch 1 --group 2", ["--gradients streamed", "leave out --group"]),
    ("--boundaries streamed --batch 8 --micro-batch 1 --group 2", ["--boundaries streamed", "leave out --group"]),
    ("--steps 10 --warmup-steps 11", ["--warmup-steps 11", "10 steps"]),
    ("--warmup-steps 1.5", ["--warmup-steps 1.5", "whole"]), ("--seq 1", ["--seq 1"]),
    ("--batch 100000", ["--batch 100000", "67,108,864"]), ("--gpu t4 --device cpu", ["--gpu t4", "--device cpu"]),
    ("--plan-only --preview 2", ["--plan-only", "--preview"]),
    # Seen to fail: these had no effect, and nothing was said.
    ("--sample-temperature 0.7", ["--sample-temperature", "give --sample-prompt"]),
    ("--segment-blocks 3 --recompute off", ["--segment-blocks 3", "leave out --recompute off"]),
    ("--segment-blocks 3 --recompute products", ["--segment-blocks 3", "leave out --recompute products"]),
])  # fmt: skip
def test_combinations_that_cannot_run_are_refused_by_name(line, names):
    message = refusal(*line.split())
    assert all(name in message for name in names)


def test_neighbours_of_the_impossible_are_accepted():
    assert parse(*"--batch 12 --micro-batch 2 --group 6".split()).group == 6
    assert parse(*"--batch 12 --group 12".split()).group == 12
    assert parse(*"--steps 10 --warmup-steps 10".split()).warmup_steps == 10
    assert parse(*"--segment-blocks 1 --recompute off".split()).segment_blocks == 1


# Values

WHOLE = "--seq --batch --steps --micro-batch --group --segment-blocks --save-every --keep-last --eval-every "
WHOLE += "--eval-batches --log-every"
BAD_VALUES = [
    *itertools.product(WHOLE.split(), ["0", "-1", "1.5", "x", "", "nan", "inf", "1e3", "9" * 30]),
    *itertools.product(["--lr", "--epochs"], ["0", "-1", "nan", "inf", "-inf", "1e400", "x", ""]),
    ("--epochs", "1e308"),
    *itertools.product(["--weight-decay", "--clip-norm", "--warmup-steps"], ["-0.1", "nan", "inf", "x", ""]),
    *itertools.product(["--eval-fraction"], ["1", "-0.1", "1.5", "nan", "x"]),
    *itertools.product(["--warmup_ratio"], ["1", "-0.1", "nan"]),
    *itertools.product(["--seed"], ["-1", "0.5", str(2**32), "x"]),
    *itertools.product(
        ["--gpu-limit", "--ram-limit"], ["0", "0GiB", "-5GiB", "-5", "11", "11GBs", "x", "", "nan", "inf"]
    ),
    *itertools.product(["--document-mask", "--fixed-batch", "--plan-only", "--demo"], ["maybe", "2", ""]),
    *itertools.product(["--init", "--schedule", "--optimizer", "--precision", "--device", "--wandb"], ["best", ""]),
    *itertools.product(["--train-on", "--recompute", "--states", "--bf16"], ["best", "none", ""]),
    *itertools.product(["--precision"], ["bf32", "int8", "fp8"]),
    *itertools.product(["--report-to"], ["mlflow", "", "wandb,", "none,wandb", "all,tensorboard", "\0"]),
    *itertools.product(["--model", "--data", "--eval-data", "--out", "--run-name", "--resume"], ["", " "]),
]


@pytest.mark.parametrize(("name", "value"), BAD_VALUES)
def test_a_bad_value_is_one_sentence_that_names_the_option(name, value):
    named = {"--warmup_ratio": "warmup"}.get(name, name)
    assert named in refusal(f"{name}={value}")


@pytest.mark.parametrize("argv", [["--steps"], ["--steps", "--seq", "8"], ["--max_steps"]])
def test_an_option_without_its_value_is_named(argv):
    assert refusal(*argv) == f"{argv[0]} needs a value."


@pytest.mark.parametrize("typed", ["-1e-4", "-1E3", "-.5e1", "-1"])
def test_a_negative_number_is_a_value_and_no_option(typed):
    assert refusal("--lr", typed) == f"--lr {float(typed):g} must be more than 0."


@pytest.mark.parametrize("typed", ["-5GiB", "-.5tb", "-16G"])
def test_a_negative_size_is_a_value_and_no_option(typed):
    assert refusal("--ram-limit", typed).startswith(f"--ram-limit: {typed!r} is not a size; ")


@pytest.mark.parametrize("typed", ["-30min", "-2h", "-5s"])
def test_a_negative_time_is_a_value_and_no_option(typed):
    assert f"{typed!r} is neither a number of steps nor a time" in refusal("--save-every", typed)


@pytest.mark.parametrize("name", ["--seq", "--max_steps", "--model", "--plan-only", "--config"])
def test_two_dashes_are_no_value(name):
    assert refusal(f"{name}=--") == f"{name} needs a value."


@pytest.mark.parametrize("values", [
    *[{"seq": "64"}, {"batch": True}, {"seq": 64.0}, {"seq": None}, {"lr": "1"}, {"lr": True}], {"lr": float("nan")},
    *[{"lr": 10**400}, {"plan_only": 1}, {"model": None}, {"model": 5}, {"out": "a\0b"}, {"precision": "fp8"}],
    *[{"wandb": "no"}, {"gpu_limit_bytes": 1.5}, {"gpu_limit_bytes": MIB - 1}, {"steps": 2**70}, {"preview": 10**5000}],
])  # fmt: skip
def test_settings_made_in_code_are_checked_too(values):
    with pytest.raises(InputError, match=option_name(next(iter(values)))):
        Settings(**values)


def test_what_a_run_reports_to():
    named = {None: "", "none": "", "wandb": "wandb", "WandB , tensorboard": "tensorboard wandb"}
    for typed, trackers in (named | {"all": "tensorboard wandb"}).items():
        assert [name for name in TRACKERS if Settings(report_to=typed).reports_to(name)] == trackers.split()


def test_sizes_may_be_texts_in_code():
    made = Settings(gpu_limit_bytes="11GiB", ram_limit_bytes="16G", disk_rate_bytes="3GiB")
    assert (made.gpu_limit_bytes, made.ram_limit_bytes, made.disk_rate_bytes) == (11 * GIB, 16 * GIB, 3 * GIB)
    assert Settings(gpu_limit_bytes="none").gpu_limit_bytes is None
    assert "'11GBs' is not a size" in refusal_in_code(gpu_limit_bytes="11GBs")


def test_all_that_is_wrong_is_said_at_once(tmp_path):
    said = refusal("--seq", "1", "--lr", "-1", "--seed", "-1")
    assert all(f"{name} " in said for name in ("--seq 1", "--lr -1", "--seed -1"))
    content = "stepz: 5\nlr: fast\nseq: 1\nbatch_size: 4\nsteps: 10\nmax_steps: 11\n"
    with pytest.raises(InputError) as error:
        parse(*config(tmp_path, content, "config.yaml"))
    first, *lines = str(error.value).splitlines()
    assert first.endswith("config.yaml: 5 of its settings cannot be used:")
    for line, name in zip(lines, ("stepz", "lr: 'fast'", "--seq 1", "batch_size", "max_steps"), strict=True):
        assert name in line and line.startswith("  ") and line[-1] in ".?"


# --demo


def test_demo_replaces_the_defaults_of_either_script():
    assert parse("--demo") == dataclasses.replace(LARGE, demo=True, **DEMO)
    assert parse("--demo", defaults=XL) == dataclasses.replace(XL, demo=True, **DEMO)


def test_what_is_typed_wins_over_demo():
    typed = parse("--demo", "--seq", "64", "--out", "x", "--lr", "1e-4")
    assert typed == dataclasses.replace(parse("--demo"), seq=64, out="x", lr=1e-4)


def test_another_length_or_batch_replaces_what_hangs_on_it():
    assert (parse("--demo", "--epochs", "2").steps, parse("--demo", "--epochs", "2").epochs) == (None, 2.0)
    assert parse("--demo", "--batch", "6").micro_batch is None
    assert parse("--demo", "--batch", "6", "--micro-batch", "3").micro_batch == 3


# --config and settings.json


def config(tmp_path, content: object, name: str = "config.json") -> tuple[str, str]:
    path = tmp_path / name
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return "--config", str(path)


def test_a_config_takes_fields_options_and_aliases_and_sizes_as_text(tmp_path):
    content = {"gpu_limit_bytes": GIB, "ram-limit": "2GiB", "max_steps": 5, "--lr": 1e-4, "plan_only": True}
    content |= {"eval_data": None, "micro_batch": "auto", "warmup_ratio": 0.5, "clip_norm": 0, "document-mask": "on"}
    chosen = dict(gpu_limit_bytes=GIB, ram_limit_bytes=2 * GIB, steps=5, lr=1e-4, plan_only=True)
    chosen |= dict(micro_batch=None, warmup_steps=0.5, clip_norm=None, document_mask=True)
    assert parse(*config(tmp_path, content)) == dataclasses.replace(LARGE, **chosen)


def test_a_config_may_name_several_texts(tmp_path):
    names = ["a.txt", "b.txt=2"]
    assert parse(*config(tmp_path, {"data": names, "eval_data": ["c.txt"]})) == dataclasses.replace(
        LARGE, data=tuple(names), eval_data="c.txt"
    )
    assert parse(*config(tmp_path, "data: [a.txt, b.txt=2]\n", "config.yaml")).data == tuple(names)
    assert parse(*config(tmp_path, {"data": names}), "--data", "d.txt").data == "d.txt"


def test_typed_wins_over_the_file_and_the_file_over_defaults_and_demo(tmp_path):
    file = config(tmp_path, {"seq": 128, "steps": 7, "demo": True})
    assert (parse(*file).seq, parse(*file).steps, parse(*file).batch) == (128, 7, DEMO["batch"])
    assert parse(*file, "--seq", "64").seq == 64
    assert parse("--seq", "64", *file).seq == 64
    assert (parse(*file, "--epochs", "1").steps, parse(*file, "--epochs", "1").epochs) == (None, 1.0)
    assert parse(*file, "--demo", "off").batch == LARGE.batch


@pytest.mark.parametrize(("content", "says"), [
    ({"stepz": 5}, "--steps"), ({"seq_lenght": 5}, "seq"), ({"batch_size": 5}, "--micro-batch"),
    ({"config": "other.json"}, "config: a settings file cannot name another one"),
    ({"": 1}, "Unknown option"), ({"steps": 5, "max_steps": 6}, "max_steps"),
    ({"steps": "five"}, "steps: 'five'"), ({"steps": [5]}, "steps: a list is no value of --steps"),
    ({"steps": {"most": 5}}, "steps: a mapping is no value of --steps"), ({"steps": 5.5}, "steps"),
    ({"model": ["gpt2"]}, "--model"), ({"data": []}, "--data: [] is not text"),
    ({"data": ["a.txt", 5]}, "--data: ['a.txt', 5] is not text"),
    ({"data": ["a.txt", " "]}, "--data must not be empty"), ({"gpu_limit": "11GBs"}, "'11GBs' is not a size"),
    ({"seq": None}, "--seq"), ('{"lr": NaN}', "lr"), ('{"lr": 1e999}', "lr"),
    ('{"steps": 5,\n"lr": %s}' % ("9" * 5000), "config.json:2: bad JSON: a number has too many digits"),
    ('{\n"steps": 5,\n}', "config.json:3: bad JSON"),
    ('{"steps": 5,\n"seq": 8,\n"steps": 6}', "config.json:3: bad JSON: the key 'steps' is given twice"),
    ("version https://git-lfs.github.com/spec/v1\n", "git lfs pull"), ("", "config.json:1: bad JSON"),
    ("[]", "one JSON object"), ("3", "one JSON object"),
])  # fmt: skip
def test_a_bad_config_is_one_sentence_that_says_where(tmp_path, content, says):
    assert says in refusal(*config(tmp_path, content))


def test_a_config_may_be_called_yml_and_what_is_typed_wins(tmp_path):
    file = config(tmp_path, "# a comment\nlearning_rate: 1e-4\nmax_steps: 5\n", "config.YML")
    assert parse(*file) == dataclasses.replace(LARGE, lr=1e-4, steps=5)
    assert parse(*file, "--lr", "1") == dataclasses.replace(LARGE, lr=1.0, steps=5)


@pytest.mark.parametrize(("content", "says"), [
    ("steps: 5\nstepz: 6\n", "config.yaml: Unknown option stepz: did you mean --steps?"),
    ("lr: fast", "lr: 'fast' is not a number"),
    ("seq: 8\nlearning_rate:\n  top: 1e-4\n", "learning_rate: a mapping is no value of --lr"),
    ("steps: 2026-01-01", "steps: '2026-01-01' is not a whole number"),
    ("steps: 1_000", "steps: '1_000' is not a whole number"), ("save_every: 1:30", "save_every: '1:30' is neither"),
    ("steps: .inf", "steps: '.inf' is not a whole number"), ("plan_only: y", "plan_only: 'y' is neither on nor off"),
    ("steps: 5\nseq: 8\nsteps: 6", "config.yaml:3: not valid YAML: the key 'steps' is given twice"),
    ("data: &a [*a]", "data: a list is no value of --data"), ("on: 5", "Unknown option on"),
    ("steps: 5\nseq: [8\n", "config.yaml:3: not valid YAML: "),
    ("steps: !!python/object:os.system 5", "config.yaml:1: not valid YAML: "),
    ("? [steps]\n: 5\n", "config.yaml:1: not valid YAML: "), ("seed: " + "9" * 5000, "9' has too many digits"),
    ("seed: -" + "9" * 19, "9' has too many digits"),
    ("- steps", "one YAML mapping"),
])  # fmt: skip
def test_a_bad_config_in_yaml_is_one_sentence_that_says_where(tmp_path, content, says):
    assert says in refusal(*config(tmp_path, content, "config.yaml"))


def test_a_config_that_cannot_be_read_is_named(tmp_path):
    assert "nowhere.json" in refusal("--config", str(tmp_path / "nowhere.json"))
    assert str(tmp_path) in refusal("--config", str(tmp_path))
    assert refusal("--config=") == "--config must not be empty."
    (tmp_path / "latin.json").write_bytes(b'{"run_name": "\xe9"}')
    assert "latin.json" in refusal("--config", str(tmp_path / "latin.json"))


@pytest.mark.parametrize(
    ("content", "values"),
    [
        ("seed: 010", dict(seed=10)),  # 8 in YAML 1.1
        ("run_name: 1:30", dict(run_name="1:30")),  # 90
        ("run_name: 2026-01-01", dict(run_name="2026-01-01")),
        ("run_name: 7", dict(run_name="7")),
        ('run_name: "7"', dict(run_name="7")),
        ("run_name: no", dict(run_name="no")),
        ("sample_prompt: 1e3", dict(sample_prompt="1e3")),
        ("lr: 1e-3", dict(lr=1e-3)),
        ("learning_rate: 1e-4  # text in YAML 1.1", dict(lr=1e-4)),
        ("document_mask: ON", dict(document_mask=True)),
        ("plan_only: yes", dict(plan_only=True)),
        ("recompute: off  # false in YAML 1.1", dict(recompute="off")),
        ("eval_data: ~", dict(eval_data=None)),
        ("eval_data: null", dict(eval_data=None)),
        ("resume: never\neval_data:", dict(resume="never", eval_data=None)),
        ("run_name: 'null'", dict(run_name="null")),
        ("data: [1, yes]", dict(data=("1", "yes"))),
        ("seq: &length 128\nbatch: *length", dict(seq=128, batch=128)),
        ("gpu-limit: 8GiB\nram_limit_bytes: 2147483648", dict(gpu_limit_bytes=8 * GIB, ram_limit_bytes=2 * GIB)),
        ("warmup_ratio: .5", dict(warmup_steps=0.5)),
        ("report_to: [tensorboard, wandb]", dict(report_to="tensorboard,wandb")),
        ("report_to: all", dict(report_to="all")),
        ("\ufeffseq: 128", dict(seq=128)),
    ],
)
def test_values_in_yaml_are_read_as_if_they_were_typed(tmp_path, content, values):
    assert parse(*config(tmp_path, content, "config.yaml")) == dataclasses.replace(LARGE, **values)


@pytest.mark.parametrize(
    "line", ["", "--demo --wandb offline", "--epochs 2.5 --clip-norm 0 --gpu-limit none --group 4"]
)
def test_settings_json_gives_the_same_settings_again(tmp_path, line):
    made = parse(*line.split(), defaults=XL)
    assert parse(*config(tmp_path, dataclasses.asdict(made)), defaults=LARGE) == made


def test_settings_json_of_a_run_that_went_on_from_another_trains_anew_in_a_new_folder(tmp_path, monkeypatch):
    made = Settings(out="run", resume="first")
    (tmp_path / "run").mkdir()
    file = config(tmp_path / "run", dataclasses.asdict(made), "settings.json")
    monkeypatch.chdir(tmp_path)
    assert parse(*file, "--out", "new").resume == "first"  # no run has begun there
    (tmp_path / "run/plan.json").write_text('{"fits": true, "tokens_per_step": 1, "predicted": {}}')
    assert parse(*file, "--out", "new") == dataclasses.replace(made, out="new", resume="auto")
    assert parse(*file, "--out", "new", "--resume", "other").resume == "other"
    assert [parse(*file, *own).resume for own in ((), ("--out", "./run/"))] == ["first", "first"]


# How long a run is


def test_steps_and_epochs_say_how_long_a_run_is_and_without_them_it_is_one_pass():
    assert LARGE.total_steps(120) == Settings(epochs=1).total_steps(120) == 120
    assert Settings(steps=7).total_steps(120) == 7
    assert Settings(epochs=0.01).total_steps(120) == 2
    assert Settings(epochs=1e-9).total_steps(120) == 1
    with pytest.raises(InputError, match="--warmup-steps 200"):
        Settings(epochs=1, warmup_steps=200).total_steps(120)


# Whatever is typed

SPELLINGS = [f"--{name}" for name in NAMES] + ["--" + name.replace("-", "_") for name in (*NAMES, *REFUSED)]
SPELLINGS += ["--config", "--help", "-h", "--", "-", "---", "--=", "-x"]
VALUES = ["1", "2", "64", "0", "-1", "0.5", "1e-4", "nan", "inf", "auto", "none", "on", "off", "11GiB", "16G", "random"]
VALUES += ["cosine", "adamw", "bf16", "true", "", " ", "a b", "--", "-5GiB", "é", "\udce9", "%s", "{", "\0"]
WORDS = (
    st.sampled_from(SPELLINGS)
    | st.sampled_from(VALUES)
    | st.text(max_size=8)
    | st.builds("--{}".format, st.text(max_size=8))
    | st.builds("{}={}".format, st.sampled_from(SPELLINGS), st.sampled_from(VALUES) | st.text(max_size=8))
)


@settings(deadline=None, max_examples=300)
@given(
    st.lists(WORDS, max_size=6) | st.lists(st.tuples(st.sampled_from(SPELLINGS), st.sampled_from(VALUES)), max_size=4)
)
def test_any_command_line_gives_settings_or_one_sentence_or_help(words):
    argv = [part for word in words for part in ([word] if isinstance(word, str) else word)]
    try:
        made = parse_arguments(argv, XL)
    except InputError as error:
        assert str(error)
    except SystemExit as stopped:
        assert stopped.code == 0
    else:
        assert Settings(**json.loads(json.dumps(dataclasses.asdict(made)))) == made


@settings(deadline=None, max_examples=200)
@given(
    st.dictionaries(
        st.sampled_from([*FIELD_NAMES, *FLAGS, "x"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
            lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        ),
        max_size=4,
    )
)
def test_any_config_gives_settings_or_one_sentence(tmp_path_factory, content):
    for name in ("any.json", "any.yaml"):  # for JSON is YAML
        path = tmp_path_factory.getbasetemp() / name
        path.write_text(json.dumps(content))
        try:
            assert isinstance(parse("--config", str(path)), Settings)
        except InputError as error:
            assert str(error)


# Paths and names as people write them

PATHS = ("model", "data", "eval_data", "chat_template", "states_folder", "out", "resume")


@pytest.mark.parametrize("field", PATHS)
def test_a_tilde_is_the_home_folder_however_the_option_is_given(tmp_path, monkeypatch, field):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "c.yaml").write_text(f"{field}: ~/x\n")
    (tmp_path / "c.json").write_text(json.dumps({field: "~/x"}))
    made = [
        parse(f"{option_name(field)}=~/x"),
        parse("--config", "~/c.yaml"),
        parse("--config=~/c.json"),
        Settings(**{field: "~/x"}),
    ]
    assert {getattr(settings, field) for settings in made} == {f"{tmp_path}/x"}
    assert getattr(Settings(**{field: "./~"}), field) == "./~"
    assert getattr(dataclasses.replace(Settings(**{field: "./~"}), seed=1), field) == "./~"
    root = Settings(**{field: "~root/x"})
    assert not getattr(root, field).startswith("~")


def test_each_of_several_has_its_home_and_its_weight(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert parse("--data=~/a.txt=2", "--data=~/b.txt", "--data=c.txt").data == (
        *("/home/me/a.txt=2", "/home/me/b.txt", "c.txt"),
    )
    assert Settings(run_name="~/x", sample_prompt="~ is $HOME", text_field="$x").run_name == "~/x"


@pytest.mark.parametrize("field", PATHS)
@pytest.mark.parametrize(("text", "said"), [
    ("~nobody-of-this-name/x", "there is no home folder ~nobody-of-this-name; write ./~nobody"),
    ("$HOME/x", "variables are not replaced here"), ("/data/${USER}/x", "variables are not replaced here"),
    ("n\udcff", "this is not UTF-8; rename it"), ("~n\ud83d", "this is not UTF-8; rename it"),
])  # fmt: skip
def test_a_path_that_nobody_can_mean_is_refused(field, text, said):
    for refused in (refusal(f"{option_name(field)}={text}"), refusal_in_code(**{field: text})):
        assert refused.startswith(f"{option_name(field)} ") and said in refused
        refused.encode()


def test_a_file_that_is_called_so_is_taken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("$HOME", "~nobody-of-this-name"):
        (tmp_path / name).touch()
        assert Settings(data=name).data == name


def test_a_home_that_is_not_utf8_or_not_known(monkeypatch):
    monkeypatch.setenv("HOME", "/home/\udcff")
    assert "this is not UTF-8" in refusal_in_code(out="~/x")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as without HOME and without an entry in passwd
    assert "there is no home folder ~" in refusal_in_code(out="~/x")


TEXTS = [name for name in FIELD_NAMES if isinstance(getattr(Settings, name), str | None)]


@pytest.mark.parametrize("field", TEXTS)
def test_no_text_that_is_not_utf8_passes(field, tmp_path):
    (tmp_path / "c.json").write_text(json.dumps({field: "n\udcff"}))
    for refused in (
        refusal(option_name(field), "n\udcff"), refusal("--config", str(tmp_path / "c.json")),
        refusal_in_code(**{field: "n\udcff"}),
    ):  # fmt: skip
        assert refused  # a number or a word is refused as such, a text because it is not UTF-8


def refusal_in_code(**values) -> str:
    with pytest.raises(InputError) as error:
        Settings(**values)
    return str(error.value)


PLANNED = (
    *("seq", "batch", "optimizer", "precision", "residual", "clip_norm", "document_mask", "pack", "steps", "device"),
    *("gpu_limit_bytes", "ram_limit_bytes", "gpu", "micro_batch", "group", "segment_blocks", "recompute", "states"),
    *("states_folder", "disk_rate_bytes", "weights", "boundaries", "gradients", "keep_last", "export_dtype"),
    "network_rate_bytes",
)


@pytest.mark.parametrize("name", PLANNED)
def test_lowmem_plan_takes_every_option_that_changes_a_plan(name):
    line, value = next((line, value) for line, field, value in OPTION_VALUES if field == name)
    needed = ["--states-folder", "/fast"] if value == "disk" else []
    settings, _ = parse_plan(["--model", "gpt2", *line.split(), *needed], {"prog": "plan"})
    assert getattr(settings, name) == value


@pytest.mark.parametrize("flag", sorted(FLAGS))
def test_a_flag_that_is_off_chooses_nothing(flag, tmp_path):
    assert parse(f"--{flag}", "False") == LARGE
    (tmp_path / "config.yaml").write_text(f"{flag}: false\n")
    assert parse("--config", str(tmp_path / "config.yaml")) == LARGE


def test_all_options_of_another_trainer_are_explained_at_once():
    with pytest.raises(InputError) as caught:
        parse("--do_train", "--tf32", "True", "--nonsense", "x", "--lr", "1e-4")
    said = str(caught.value).split("\n  ")
    assert said[0] == "3 of the options cannot be used:" and len(said) == 4
    assert said[1].startswith("--do_train is not an option here: ") and "nonsense" in said[3]
