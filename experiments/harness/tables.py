"""Tables in Markdown, and where in a README they go."""

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
    """True if forward and backward run twice a step, by plan.json's `choice` or an older row's."""
    return choice.get("fate") == "dropped" or choice.get("norm_first", False)


def learned_table(rows: Iterable[dict], kinds: tuple[str, ...]) -> str:
    """Returns a table of trainings with their losses and accuracies; `kinds`: the fields that say which it is."""
    lines = [
        [str(row[kind]) for kind in kinds]
        + [str(row["steps"]), str(row["batch"]), f"{row['learning_rate']:g}"]
        + [f"{row['losses'][place]:.3f}" for place in (0, -1)]
        + [f"{row['test_accuracy']:.1%}"]
        for row in rows
    ]
    return markdown((*kinds, "steps", "batch", "rate", "first loss", "last loss", "test accuracy"), lines)


def put(path: Path, begin: str, content: str) -> None:
    """Writes the file with `content` between the mark `begin` and the END that follows. ValueError, and the file as it
    was, if a mark is missing."""
    before, _, after = _parts(path, begin)
    path.write_text(f"{before}{begin}\n\n{content}\n\n{END}{after}", encoding="utf-8")


def put_all(pages: Iterable[Page]) -> None:
    for page in pages:
        put(*page)


def written(path: Path, begin: str) -> str:
    """Returns the content that `put` wrote there."""
    return _parts(path, begin)[1].strip("\n")


def _parts(path: Path, begin: str) -> tuple[str, str, str]:
    """Returns the file's text before, between and after its marks."""
    before, mark, rest = path.read_text(encoding="utf-8").partition(begin)
    content, end, after = rest.partition(END)
    if not mark or not end:
        raise ValueError(f"{path}: no {begin} with an {END} after it")
    return before, content, after
