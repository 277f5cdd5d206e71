"""Turns a command line into Settings, or refuses it with one sentence.

Typed options override the file of --config, which overrides the script's own Settings. Options cannot be abbreviated.
"""

import argparse
import json
import os
import re
import shutil
import sys
import textwrap
from dataclasses import Field, asdict, fields
from difflib import get_close_matches
from pathlib import Path
from types import NoneType

from lowmem.errors import InputError
from lowmem.fields import checked, each, option_name, read_path_option
from lowmem.run.batch_option import ACCUMULATION, PER_DEVICE, with_batch
from lowmem.run.options import FLAGS, NAMES, NOTHING, OPTIONS, REFUSED, SEVERAL, TITLES, integer, switch
from lowmem.run_folder import is_run
from lowmem.settings import DEMO, Settings, in_words
from lowmem.terminal import say
from lowmem.text_files import parse_json, parse_yaml, read_text

TRAIN = {
    "description": "Train every parameter of a language model under hard caps of GPU memory and RAM.",
    "epilog": "Exit codes: 0 done, 2 bad usage or input, 3 no plan fits the caps, or no room on the disk, 4 a cap "
    "was exceeded or GPU memory ran out, 75 stopped by a signal with a checkpoint saved, 129, 130 or 143 ended at once "
    "by signals, 1 anything else.",
}

_NEGATIVE = re.compile(r"-((\d+\.?\d*|\.\d+)(e[+-]?\d+)?|inf(inity)?|nan)([kmgt]?i?b|[kmgt]|s|min|h)?$", re.IGNORECASE)
_HINTS = {item.name: item.type for item in fields(Settings)}
_REPLACED = {  # {option: options of lower layers that it replaces, because they set the same thing}
    **{"steps": ("epochs",), "epochs": ("steps",)},
    **{"batch": (PER_DEVICE, ACCUMULATION), PER_DEVICE: ("batch",), ACCUMULATION: ("batch",)},
}


class CommandParser(argparse.ArgumentParser):
    """Parses options like ArgumentParser, but raises InputError instead of exiting."""

    def error(self, message: str):
        message = message.removeprefix("argument ").replace(": expected one argument", " needs a value")
        raise InputError(f"{message}.")


class Help(argparse.HelpFormatter):
    """Formats help as wide as the terminal, without splitting names at hyphens."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=28, width=min(shutil.get_terminal_size().columns, 110) - 2)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(self._split_lines(" ".join(text.split()), width))


class _Record(argparse.Action):
    """Stores each typed option as namespace.typed[field of Settings] = (name as typed, value). Raises InputError if two
    names of one option have different values."""

    def __call__(self, parser, namespace, typed, spelling=None):
        field, parse = NAMES[_dashed(spelling)]
        try:
            value = parse(typed)
        except ValueError as error:
            raise InputError(f"{spelling}: {error}.") from None
        if value is NOTHING:
            return
        earlier, earlier_value = namespace.typed.get(field, (spelling, value))
        same_name = _dashed(earlier) == _dashed(spelling)
        if not same_name and earlier_value != value:
            raise InputError(f"{earlier} and {spelling} set the same thing to different values: give one of them.")
        if field in SEVERAL and field in namespace.typed and same_name:
            value = (*each(earlier_value), value)
        namespace.typed[field] = (spelling, value)


def parse_arguments(argv: list[str], defaults: Settings) -> Settings:
    """Returns `defaults`, overridden by the file of --config, and then by the command line `argv` (without the
    program's name). Raises InputError for unknown options and bad values. ``--help`` exits with 0."""
    prog = Path(sys.argv[0]).name
    usage = "lowmem train [options]" if prog == "lowmem" else f"python {prog} [options]"
    return _settings(_chosen(_build_parser(defaults, TRAIN | {"usage": usage}), argv)[0], defaults)


def parse_plan(argv: list[str], program: dict[str, str]) -> tuple[Settings, argparse.Namespace]:
    """Returns the Settings for the command line `argv` of `lowmem plan`, and a namespace with `json`, `gpus`,
    `machines` and `write` (True if --out was given). `program`: ArgumentParser's arguments, such as the description.
    Raises InputError if there is neither --model nor --demo."""
    defaults = Settings(init="random", plan_only=True)
    parser = _build_parser(defaults, program)
    parser.add_argument("--json", action="store_true", help="print only the content of plan.json")
    parser.add_argument("--gpus", type=integer, default=1, metavar="N", help="for N of these cards, with torchrun")
    parser.add_argument("--machines", type=integer, default=1, metavar="M", help="for M machines of N cards (1)")
    chosen, options = _chosen(parser, argv)
    if "model" not in chosen and not chosen.get("demo"):
        raise InputError("--model is needed: a name on the Hugging Face hub, a folder or a config.json.")
    options.write = "out" in chosen
    # For a named card, the default cap is all of its memory.
    if chosen.get("gpu") is not None:
        chosen = {"gpu_limit_bytes": None} | chosen
    return _settings(chosen | {"plan_only": True}, defaults), options


def _chosen(parser: argparse.ArgumentParser, argv: list[str]) -> tuple[dict[str, object], argparse.Namespace]:
    """Returns {field of Settings: value} for the options in `argv` and in its --config file. Also returns a namespace
    with options that are no settings, such as --json. Raises InputError for unknown options and bad values."""
    for word in argv:
        if word.startswith("-") and word.endswith("=--"):  # argparse of Python 3.11 makes an empty list of this value
            raise InputError(f"{word[:-3]} needs a value.")
    known, unknown = parser.parse_known_args(argv, argparse.Namespace(typed={}, config=None))
    if unknown:
        named = (word for word in unknown if word.startswith("-") and not _NEGATIVE.match(word))
        misspelt = list(dict.fromkeys(word.split("=")[0] for word in named))
        if not misspelt:
            raise InputError(f"Unexpected argument {unknown[0]!r}: options begin with --; see --help.")
        raise InputError(_listed("the options", [_explain_unknown(name) for name in misspelt]))
    in_file = {}
    if known.config is not None:
        in_file = _read_config(file := read_path_option("--config", known.config))
        if "out" in known.typed and _is_of_another_run(Path(file), known.typed["out"][1]):
            in_file.pop("resume", None)  # the new run begins with the first weights
    lower, upper = ({field: value for field, (_, value) in layer.items()} for layer in (in_file, known.typed))
    spelled = {field: spelling for field, (spelling, _) in (in_file | known.typed).items()}
    return with_batch(_over(lower, upper), spelled, say), known


def _settings(chosen: dict[str, object], defaults: Settings) -> Settings:
    base = asdict(defaults)
    if chosen.get("demo", defaults.demo):
        base = _over(base, DEMO)
    if "batch" in chosen:
        base |= {"micro_batch": None, "group": None}  # the defaults were chosen for another batch
    return Settings(**_over(base, chosen))


def _over(lower: dict[str, object], upper: dict[str, object]) -> dict[str, object]:
    replaced = {name for field, value in upper.items() if value is not None for name in _REPLACED.get(field, ())}
    return {field: value for field, value in lower.items() if field not in replaced} | upper


def _build_parser(defaults: Settings, program: dict[str, str]) -> argparse.ArgumentParser:
    parser = CommandParser(**program, formatter_class=Help, allow_abbrev=False)
    parser._negative_number_matcher = _NEGATIVE  # argparse's own takes -1e-4 for an option
    for item in fields(Settings):
        if item.name in TITLES:
            section = parser.add_argument_group(TITLES[item.name])
        name, metavar = option_name(item.name), item.metadata["metavar"] or OPTIONS[item.name][0]
        section.add_argument(name, metavar=metavar, help=_help(item, defaults), **_keywords(name[2:]))
    config_help = "settings.json of another run, or options in JSON or YAML (.yaml, .yml); typed options override it"
    section.add_argument("--config", metavar="FILE", help=f"{config_help} (default: none)")
    visible = {option_name(field) for field in OPTIONS}
    for name in NAMES:
        for spelling in sorted({f"--{name}", "--" + name.replace("-", "_")} - visible):
            parser.add_argument(spelling, help=argparse.SUPPRESS, **_keywords(name))
    return parser


def _read_config(path: str) -> dict[str, tuple[str, object]]:
    """Reads a YAML (.yaml, .yml) or JSON file of settings. Returns {field of Settings: (its name in the file, parsed
    value)}. Raises one InputError for all problems in the file."""
    yaml = path.lower().endswith((".yaml", ".yml"))
    try:
        content = (parse_yaml if yaml else parse_json)(read_text(Path(path)), path)
        if not isinstance(content, dict):
            shape = "YAML mapping, with lines such as `steps: 100`" if yaml else 'JSON object, such as {"steps": 100}'
            raise InputError(f"{path}: settings are one {shape}")
    except InputError as error:
        raise InputError(f"{error}.") from None
    except (OSError, ValueError) as error:  # ValueError: an impossible path
        raise InputError(f"--config {path}: cannot be read: {getattr(error, 'strerror', None) or error}.") from None
    chosen: dict[str, tuple[str, object]] = {}
    problems = []
    for key, value in content.items():
        try:
            field, value = _read_item(str(key), value)
        except InputError as error:
            problems.append(str(error))
            continue
        if value is not NOTHING and chosen.setdefault(field, (key, value))[1] != value:
            problems.append(f"{key} is given twice, under two names, with different values.")
    if problems:
        raise InputError(f"{path}: {_listed('its settings', problems)}")
    return chosen


def _is_of_another_run(file: Path, out: str) -> bool:
    folder = os.path.realpath(read_path_option("--out", out))
    return file.name == "settings.json" and is_run(file.parent) and os.path.realpath(file.parent) != folder


def _listed(of: str, problems: list[str]) -> str:
    if len(problems) == 1:
        return problems[0]
    return "\n  ".join((f"{len(problems)} of {of} cannot be used:", *problems))


def _read_item(key: str, value: object) -> tuple[str, object]:
    """Reads one setting of a settings file. Returns the field of Settings that `key` names, and the parsed value, which
    is NOTHING for a flag switched off. Raises InputError if name or value cannot be used."""
    if _dashed(key) == "config":
        raise InputError(f"{key}: a settings file cannot name another one.")
    if _dashed(key) not in NAMES:
        raise InputError(_explain_unknown(key))
    field, parse = NAMES[_dashed(key)]
    if field in SEVERAL and isinstance(value, list) and not any(isinstance(item, list | dict) for item in value):
        parse = str  # `checked` checks the items of the list
    elif field == "report_to" and isinstance(value, list) and all(isinstance(item, str) for item in value):
        value = ",".join(value) or "none"
    elif not isinstance(value, str | int | float | NoneType):
        kind = {list: "a list", dict: "a mapping"}.get(type(value), f"a {type(value).__name__}")
        raise InputError(f"{key}: {kind} is no value of {option_name(field)}.")
    if value is not None and parse is not str:
        try:
            value = parse(value if isinstance(value, str) else json.dumps(value))
        except ValueError as error:
            raise InputError(f"{key}: {error}.") from None
    if value is NOTHING:
        return field, value
    return field, checked(field, _HINTS.get(field, int), value)


def _explain_unknown(name: str) -> str:
    if _dashed(name) in REFUSED:
        return f"{name} is not an option here: {REFUSED[_dashed(name)]}."
    near = get_close_matches(_dashed(name), [*NAMES, "config", *REFUSED], n=1, cutoff=0.62)
    if not near:
        return f"Unknown option {name}; --help lists them all."
    if near[0] in REFUSED:
        return f"Unknown option {name}; the nearest, --{near[0]}, is no option here: {REFUSED[near[0]]}."
    field = NAMES[near[0]][0] if near[0] in NAMES else near[0]
    same = "" if option_name(field) == f"--{near[0]}" else f" (the same as {option_name(field)})"
    return f"Unknown option {name}: did you mean --{near[0]}{same}?"


def _dashed(spelling: str) -> str:
    return spelling.lstrip("-").replace("_", "-")


def _keywords(name: str) -> dict[str, object]:
    # An option that is on or off needs no value: `--name` alone means "on".
    alone = {"nargs": "?", "const": "on"} if name in FLAGS or NAMES[name][1] is switch else {}
    return {"action": _Record, "dest": "typed", "default": argparse.SUPPRESS, **alone}


def _help(item: Field, defaults: Settings) -> str:
    value = getattr(defaults, item.name)
    shown = f"{value:g}" if isinstance(value, float) else in_words(item.name, value)
    default = "needed" if item.name == "model" and defaults.plan_only else f"default: {shown}"
    return f"{item.metadata['help']} ({default})".replace("%", "%%")
