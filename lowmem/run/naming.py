"""Names the output folder of a run, if --out is not given. It is the first of runs/NAME, runs/NAME-2, ... that holds no
run, or a run that the given settings can continue."""

import glob
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

from lowmem.data.sources import split_weight
from lowmem.data.tables import KNOWN_SUFFIXES
from lowmem.errors import InputError
from lowmem.fields import each
from lowmem.run.learning_rate import COURSE, longer
from lowmem.run_folder import read_run_json
from lowmem.settings import DEFAULT_EPOCHS, RUN, TOKENS, Settings, changed, marked

_ROOT = "runs"
_UNNAMED = ("", "model", "config.json")  # last parts of a path that do not identify the model
_MOST_CHARACTERS = 60  # of a model's or a text's name
_MOST_NAMED = 3  # texts in a folder's name, or differences in a sentence


def with_run_folder(settings: Settings, say: Callable[[str], None]) -> Settings:
    """Returns `settings` with the path of the output folder in `out`. If `out` is None, names the folder after model
    and data. If that folder holds another run, tries NAME-2, NAME-3, ..., and `say` gets a sentence about folders
    passed over."""
    if settings.out is not None:
        return settings
    name = "demo" if settings.demo else f"{_model_name(settings.model)}-{_data_name(each(settings.data))}"
    others = []
    for number in itertools.count(1):
        folder = Path(_ROOT, name if number == 1 else f"{name}-{number}")
        differences = list(_differences(folder / "settings.json", settings))
        if not differences:
            break
        more = "".join(f", {difference}" for difference in differences[:_MOST_NAMED])
        others.append(f"{folder} holds another run ({more[2:]})")
    if others:
        say(f"{'; '.join(others[-_MOST_NAMED:])}: this one goes to {folder}")
    return replace(settings, out=str(folder))


def _differences(file: Path, settings: Settings) -> Iterator[str]:
    """Yields a phrase on each difference from an earlier run's settings.json, `file`, that prevents `settings` from
    resuming that run. Yields nothing if `file` does not exist."""
    if not file.exists():
        return
    if not (saved := read_run_json(file)):
        yield "its settings.json cannot be read"
        return
    wanted = json.loads(json.dumps(asdict(settings)))
    saved = {name: saved.get(name, getattr(Settings, name)) for name in wanted}
    names = dict.fromkeys((*marked(settings, RUN | TOKENS), "data", "precision"))
    if settings.micro_batch is not None:
        names["micro_batch"] = None
    if _length(saved) != _length(wanted):
        if not _is_longer(saved, wanted):
            names |= {"steps": None, "epochs": None}
        else:
            names = {name: None for name in names if name not in COURSE}
    for name in names:
        if saved[name] != wanted[name]:
            yield changed(name, saved[name], wanted[name])


def _length(values: dict) -> tuple[str, float]:
    if values["steps"] is not None:
        return "steps", values["steps"]
    return "epochs", DEFAULT_EPOCHS if values["epochs"] is None else values["epochs"]


def _is_longer(saved: dict, wanted: dict) -> bool:
    (unit, before), (other, now) = _length(saved), _length(wanted)
    try:
        return unit == other and bool(longer(saved | {"steps": before}, wanted | {"steps": now}))
    except InputError:
        return False


def _model_name(model: str) -> str:
    parts = [part for part in Path(os.path.abspath(model)).parts if part not in (os.sep, *_UNNAMED)]
    return _plain(parts[-1] if parts else "model")


def _data_name(specs: tuple[str, ...]) -> str:
    names = list(dict.fromkeys(map(_text_name, specs)))
    more = [f"{len(names) - _MOST_NAMED}-more"] if len(names) > _MOST_NAMED else []
    return "+".join(names[:_MOST_NAMED] + more)


def _text_name(spec: str) -> str:
    name, _ = split_weight(spec)
    if glob.has_magic(name) and not os.path.exists(name):  # the folder above the pattern
        parts = itertools.takewhile(lambda part: not glob.has_magic(part), Path(name).parts)
        name = os.path.join("", *parts)
    last = Path(os.path.abspath(name))
    return _plain(last.stem if last.suffix.lower() in KNOWN_SUFFIXES else last.name)


def _plain(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name).strip("-.")[:_MOST_CHARACTERS] or "unnamed"
