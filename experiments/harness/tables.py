"""Tables in Markdown, and where in a README they go."""

from collections.abc import Iterable
from pathlib import Path

END = "<!-- end -->"


def markdown(header: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    header = list(header)
    lines = [[cell.replace("|", "\\|").replace("\n", " ") for cell in line] for line in (header, *lines)]
    lines.insert(1, ["---"] * len(header))
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def between(text: str, begin: str, content: str) -> str:
    """`text` with `content` between the mark `begin` and the END that follows. ValueError where a mark is missing."""
    before, mark, rest = text.partition(begin)
    _, end, after = rest.partition(END)
    if not mark or not end:
        raise ValueError(f"no {begin} with an {END} after it")
    return f"{before}{begin}\n\n{content}\n\n{END}{after}"


def put(path: Path, begin: str, content: str) -> None:
    """Writes the file with `content` between its marks."""
    path.write_text(between(path.read_text(encoding="utf-8"), begin, content), encoding="utf-8")
