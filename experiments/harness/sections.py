"""Measures an experiment's command lines, which are sorted into sections. Makes a page with a table per section."""

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from experiments.harness import rows as row_file
from experiments.harness.options import check_rows, under_runs
from lowmem.errors import InputError

Section = tuple[tuple[str, ...], str, Callable[[list[dict]], str]]  # sections of its rows, title, table


def measure(
    program: str,
    cases: Mapping[str, Sequence[str]],
    values_of: Callable[[str, str], dict],
    committed: Path,
    page_of: Callable[[list[dict]], str],
    arguments: list[str] | None,
    sources: str | None = None,
) -> int:
    """Measures the command lines that the options choose from `cases`, {section: its command lines}. Appends a row for
    each, and prints the page of all rows. `values_of(section, command line)` returns a row's values. `committed`: the
    file of rows in the repository. `sources`: digest of the code; None: the program's. Returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog=f"python -m {program}", allow_abbrev=False)
    parser.add_argument("--only", choices=cases, action="append", help="default: all of them")
    parser.add_argument("--matching", default="", metavar="TEXT", help="only command lines with this text in them")
    parser.add_argument("--rows", type=Path, default=under_runs(committed), metavar="ROWS.jsonl")
    options = parser.parse_args(arguments)
    chosen = [
        (section, words) for section in options.only or cases for words in cases[section] if options.matching in words
    ]
    if not chosen:
        raise InputError(f"--matching {options.matching}: no command line has that in it")
    check_rows(options.rows)
    common = {"sources": sources or row_file.sources(program)} | row_file.made_by(program, arguments)
    for section, words in chosen:
        print(section, words, flush=True)
        row = common | {"section": section, "options": words} | values_of(section, words)
        row_file.append(options.rows, row)
    print(page_of(row_file.read(options.rows)))
    return 0


# Of rows with the same section and command line, the newest counts.
def newest(rows: Iterable[dict], *sections: str) -> list[dict]:
    return list({(row["section"], row["options"]): row for row in rows if row["section"] in sections}.values())


def page(rows: list[dict], sections: Iterable[Section], newest: Callable[..., list[dict]] = newest) -> str:
    """Returns Markdown: a title and a table for each section with rows, and the machine of the last row. A section is
    (names of sections in rows, title, function that makes the table). `newest(rows, *names)` selects its rows."""
    parts = []
    for names, title, table in sections:
        if found := newest(rows, *names):
            parts += [title, table(found)]
    for last in [row for row in rows if "machine" in row][-1:]:
        parts.append(f"On {last['machine']}; torch {last['versions']['torch']}, Python {last['versions']['python']}.")
    return "\n\n".join(parts)
