"""From a command line to Settings, or to one sentence that says why not.

The defaults come from the script's own Settings, so the scripts cannot differ in what they understand. Three layers:
those defaults (changed by ``--demo``), the file of ``--config``, what was typed; the later wins. Nothing is written,
and nothing but the ``--config`` file is read. There are no abbreviations; a misspelt option is answered with the
nearest.
"""

import argparse
import json
import shutil
import textwrap
from dataclasses import Field, asdict, fields
from difflib import get_close_matches
from pathlib import Path
from types import NoneType

from lowmem.errors import InputError
from lowmem.paths import read_path_option
from lowmem.run.options import FLAGS, NAMES, OPTIONS, REFUSED, SEVERAL, TITLES, switch
from lowmem.settings import DEMO, Settings, each, option_name, read_object
from lowmem.text_files import read_text
from lowmem.units import format_size


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        message = message.removeprefix("argument ").replace(": expected one argument", " needs a value")
        raise InputError(f"{message}.")


class _Help(argparse.HelpFormatter):
    """As wide as the terminal, but no wider than is easily read; names such as python-stdlib stay whole."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=28, width=min(shutil.get_terminal_size().columns, 110) - 2)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)


class _Record(argparse.Action):
    """Keeps (spelling, value) by field. The same option typed again overrules itself, as command lines do, or is one
    more where there may be several; two spellings that disagree are an error, since neither is known to be meant."""

    def __call__(self, parser, namespace, typed, spelling=None):
        field, parse = NAMES[_dashed(spelling)]
        try:
            value = parse(typed)
        except ValueError as error:
            raise InputError(f"{spelling}: {error}.") from None
        earlier, earlier_value = namespace.typed.get(field, (spelling, value))
        if _dashed(earlier) != _dashed(spelling) and earlier_value != value:
            raise InputError(f"{earlier} and {spelling} set the same thing to different values: give one of them.")
        if field in SEVERAL and field in namespace.typed and _dashed(earlier) == _dashed(spelling):
            value = (*each(earlier_value), value)
        namespace.typed[field] = (spelling, value)


def parse_arguments(argv: list[str], defaults: Settings) -> Settings:
    """The settings of a run from its command line (without the program's name), over a script's `defaults`.

    Raises InputError for what cannot be understood or cannot run; ``--help`` prints and exits with 0."""
    for word in argv:
        if word.startswith("-") and word.endswith("=--"):  # argparse of Python 3.11 makes an empty list of this value
            raise InputError(f"{word[:-3]} needs a value.")
    known, unknown = _build_parser(defaults).parse_known_args(argv, argparse.Namespace(typed={}, config=None))
    if unknown:
        misspelt = next((word for word in unknown if word.startswith("-")), None)
        if misspelt is None:
            raise InputError(f"Unexpected argument {unknown[0]!r}: options begin with --; see --help.")
        raise InputError(_explain_unknown(misspelt.split("=")[0]))

    chosen = {} if known.config is None else _read_config(read_path_option("--config", known.config))
    typed = {field: value for field, (_, value) in known.typed.items()}
    chosen = _over(chosen, typed)
    base = asdict(defaults)
    if chosen.get("demo", defaults.demo):
        base = _over(base, DEMO)
    if "batch" in chosen:
        base.update(micro_batch=None, group=None)  # they were chosen for another batch
    return Settings(**_over(base, chosen))


def _over(lower: dict[str, object], upper: dict[str, object]) -> dict[str, object]:
    """`upper` over `lower`; steps and epochs replace each other, as both say how long a run is."""
    if upper.get("steps") is not None or upper.get("epochs") is not None:
        lower = {**lower, "steps": None, "epochs": None}
    return {**lower, **upper}


def _build_parser(defaults: Settings) -> argparse.ArgumentParser:
    parser = _Parser(
        usage="python %(prog)s [options]",
        description="Train every parameter of a language model under hard caps of GPU memory and RAM.",
        epilog="Exit codes: 0 done, 2 bad usage or input, 3 no plan fits the caps, 4 a cap was exceeded, "
        "75 stopped by a signal with a checkpoint saved, 1 anything else.",
        formatter_class=_Help,
        allow_abbrev=False,
    )
    for item in fields(Settings):
        if item.name in TITLES:
            section = parser.add_argument_group(TITLES[item.name])
        name, metavar = option_name(item.name), item.metadata["metavar"] or OPTIONS[item.name][0]
        section.add_argument(name, metavar=metavar, help=_help(item, defaults), **_keywords(name[2:]))
    config_help = "settings.json of another run, or options in JSON or YAML (.yaml, .yml); what is typed wins over it"
    section.add_argument("--config", metavar="FILE", help=f"{config_help} (default: none)")

    visible = {option_name(field) for field in OPTIONS}
    for name in NAMES:
        for spelling in sorted({f"--{name}", "--" + name.replace("-", "_")} - visible):
            parser.add_argument(spelling, help=argparse.SUPPRESS, **_keywords(name))
    return parser


def _read_config(path: str) -> dict[str, object]:
    """The settings in a file, by field: YAML where its name ends so, else JSON. Its keys are names of fields or
    options, sizes may be text."""
    try:
        content = read_object(read_text(Path(path)), path, Path(path).suffix.lower() in (".yaml", ".yml"))
    except InputError as error:
        raise InputError(f"{error}.") from None
    except (OSError, ValueError) as error:  # ValueError: a path that cannot be
        raise InputError(f"--config {path}: cannot be read: {getattr(error, 'strerror', None) or error}.") from None
    chosen: dict[str, object] = {}
    for key, value in content.items():
        if _dashed(key) not in NAMES:
            raise InputError(f"{path}: {_explain_unknown(key)}")
        field, parse = NAMES[_dashed(key)]
        if field in SEVERAL and isinstance(value, list) and not any(isinstance(item, list | dict) for item in value):
            parse = str  # Settings look at what is in it
        elif not isinstance(value, str | int | float | NoneType):  # what JSON and YAML have for text, numbers, switches
            kind = {list: "a list", dict: "a mapping"}.get(type(value), f"a {type(value).__name__}")
            raise InputError(f"{path}: {key}: {kind} is no value of {option_name(field)}.")
        if value is not None and parse is not str:
            try:
                value = parse(value if isinstance(value, str) else json.dumps(value))
            except ValueError as error:
                raise InputError(f"{path}: {key}: {error}.") from None
        if chosen.setdefault(field, value) != value:
            raise InputError(f"{path}: {key} is given twice, under two names, with different values.")
    return chosen


def _explain_unknown(name: str) -> str:
    """One sentence for an option that is not one: what to use instead, or the nearest."""
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
    """What argparse is told of any option; a switch or a flag may stand alone."""
    alone = {"nargs": "?", "const": "on"} if name in FLAGS or NAMES[name][1] is switch else {}
    return {"action": _Record, "dest": "typed", "default": argparse.SUPPRESS, **alone}


def _help(item: Field, defaults: Settings) -> str:
    value, shown = getattr(defaults, item.name), item.metadata["shown"]
    if isinstance(value, bool):
        shown = "on" if value else "off"
    elif value is not None:
        shown = (
            format_size(value) if item.name.endswith("_bytes") else f"{value:g}" if isinstance(value, float) else value
        )
    return f"{item.metadata['help']} (default: {shown})".replace("%", "%%")
