"""Runs `python -m lowmem report`: makes a page about training runs, with their curves overlaid."""

from pathlib import Path

from lowmem.errors import InputError, LowmemError
from lowmem.run.cli import CommandParser, Help
from lowmem.run.page import write_page
from lowmem.run.signals import interrupt_ends_at_once
from lowmem.run_folder import is_run
from lowmem.terminal import output, say


def main(arguments: list[str]) -> int:
    """Writes an HTML page about training runs, prints its path, and returns the exit code. `arguments`: the words after
    `lowmem report`."""
    parser = CommandParser(
        prog="python -m lowmem report", usage="%(prog)s RUN [RUN ...] [--out FILE]", allow_abbrev=False,
        formatter_class=Help, description="Makes one HTML page about training runs, with curves, memory, samples and "
        "settings. A run may be finished, stopped or still going on. The page needs no network.",
    )  # fmt: skip
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run folder (--out of training)")
    where = "where to write the page (default: report.html in the run's folder; here, if there are several)"
    parser.add_argument("--out", metavar="FILE", help=where)
    try:
        options = parser.parse_args(arguments)
        folders = [Path(run).expanduser() for run in options.runs]
        runs = [folder for folder in folders if is_run(folder)]
        path = runs[0] if len(runs) == 1 else Path()
        if options.out is not None:
            path = Path(options.out).expanduser()
            if not path.parent.is_dir():
                raise InputError(f"--out {path}: there is no folder {path.parent}")
        if path.is_dir():
            path /= "report.html"
        if path.exists() and path.suffix != ".html":
            raise InputError(f"--out {path} is there already, and is not an .html file: give another name")
        try:
            with interrupt_ends_at_once():
                write_page(folders, path, lambda sentence: say(f"lowmem report: {sentence}"))
        except OSError as error:
            temporary = error.filename is None or str(error.filename).endswith(".partial")
            raise InputError(f"{path if temporary else error.filename}: {error.strerror}") from None
        with output(needed=True):
            print(path)
    except LowmemError as error:
        say(f"lowmem report: {error}")
        return error.exit_code
    return 0
