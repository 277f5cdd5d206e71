"""Makes tables in Markdown, and writes them into files, between two marks."""

from collections.abc import Iterable
from pathlib import Path

END = "<!-- end -->"
Page = tuple[Path, str, str]  # a file, the mark before a table, the table


def markdown(header: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    header = list(header)
    lines = [[cell.replace("|", "\\|").replace("\n", " ") for cell in line] for line in (header, *lines)]
    lines.insert(1, ["---"] * len(header))
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def runs_twice(choice: dict) -> bool:
    """Returns True if each step runs forward and backward twice, by `choice`, the step's layout in a row of results."""
    return choice.get("fate") == "dropped" or choice.get("norm_first", False)  # older rows have norm_first


def learned_table(rows: Iterable[dict], kinds: tuple[str, ...]) -> str:
    """Returns a table of trainings with losses and accuracies. `kinds`: fields that identify a training."""
    lines = [
        [str(row[kind]) for kind in kinds]
        + [str(row["steps"]), str(row["batch"]), f"{row['learning_rate']:g}"]
        + [f"{row['losses'][place]:.3f}" for place in (0, -1)]
        + [f"{row['test_accuracy']:.1%}"]
        for row in rows
    ]
    return markdown((*kinds, "steps", "batch", "rate", "first loss", "last loss", "test accuracy"), lines)


def put(path: Path, begin: str, content: str) -> None:
    """Replaces the text between the mark `begin` and the next END. Raises ValueError, and changes nothing, if a mark is
    missing."""
    before, _, after = _parts(path, begin)
    path.write_text(f"{before}{begin}\n\n{content}\n\n{END}{after}", encoding="utf-8")


def put_all(pages: Iterable[Page]) -> None:
    for page in pages:
        put(*page)


def written(path: Path, begin: str) -> str:
    """Returns the text between the mark `begin` and the next END, where `put` writes."""
    return _parts(path, begin)[1].strip("\n")


def _parts(path: Path, begin: str) -> tuple[str, str, str]:
    before, mark, rest = path.read_text(encoding="utf-8").partition(begin)
    content, end, after = rest.partition(END)
    if not mark or not end:
        raise ValueError(f"{path}: no {begin} with an {END} after it")
    return before, content, after
