"""Shows the continuations side by side, as text, and as a page for a browser."""

import html
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from experiments.code_generation import scoring
from experiments.code_generation.corpus import Beginning

SHOWN_LINES = 14  # of what stands before a continuation
COLUMNS = ("before", "after")
ROWS = {
    "loss": ("held-out loss, nats per token", "{:.3f}"),
    "bits_per_byte": ("held-out bits per byte", "{:.3f}"),
    "parsing_lines": ("next lines that parse", "{:.1%}"),
    "exact_next_lines": ("next lines that are the true one", "{:.1%}"),
    "parsing_functions": ("functions that parse with what was written", "{:.1%}"),
    "compiling_functions": ("functions that compile with it", "{:.1%}"),
    "different_next_lines": ("different next lines", "{:,}"),
}
_STYLE = """
:root { color-scheme: light; --good: #1a7f37; --bad: #b42318; --faint: #667085; --line: #e4e7ec; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1200px; padding: 0 1rem; color: #101828; }
h1 { font-size: 1.5rem; margin-bottom: .25rem; }
p { color: var(--faint); margin: .25rem 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0 2rem; }
th, td { padding: .3rem 1rem; border-bottom: 1px solid var(--line); text-align: right; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
article { border-top: 1px solid var(--line); padding: 1rem 0; }
article h2 { font-size: 1rem; margin: 0 0 .5rem; color: var(--faint); font-weight: 600; }
.columns { display: grid; grid-template-columns: repeat(3, minmax(0, 1fr)); gap: 1rem; }
.columns h3 { font-size: .9rem; margin: 0 0 .25rem; }
pre { margin: 0; padding: .75rem; background: #f9fafb; border-radius: 6px; overflow-x: auto;
      font: 13px/1.45 ui-monospace, "DejaVu Sans Mono", monospace; }
.begun { margin-bottom: .75rem; color: var(--faint); }
.good { color: var(--good); } .bad { color: var(--bad); } .rest { color: #98a2b3; }
@media (max-width: 800px) { .columns { grid-template-columns: 1fr; } }
"""


def write_text(
    path: Path, report: dict, begun: Sequence[Beginning], before: Sequence[str], after: Sequence[str]
) -> None:
    lines = [_heading(report), ""]
    for key, (name, form) in ROWS.items():
        lines.append(f"{name}: " + ", ".join(f"{column} {form.format(report[column][key])}" for column in COLUMNS))
    for number, (one, *texts) in enumerate(zip(begun, before, after, strict=True), 1):
        lines += ["", f"--- {number} " + "-" * 60, _end_of(one.begun)]
        for name, text in zip(("true", *COLUMNS), (one.rest, *texts), strict=True):
            lines += [f"[{name}: {_verdict(one, text)}]", text.rstrip("\n")]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8", errors="replace")


def write_page(
    path: Path, report: dict, begun: Sequence[Beginning], before: Sequence[str], after: Sequence[str]
) -> None:
    cells = "".join(
        f"<tr><td>{name}</td>{''.join(f'<td>{form.format(report[column][key])}</td>' for column in COLUMNS)}"
        f"<td>{form.format(report['true'][key]) if key in report['true'] else ''}</td></tr>"
        for key, (name, form) in ROWS.items()
    )
    articles = "".join(_articles(begun, before, after))
    path.write_text(
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Code, before and after</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style><h1>What the model writes, before and after training</h1>"
        f"<p>{_escaped(_heading(report))}</p><table><tr><th></th><th>before</th><th>after</th><th>true text</th></tr>"
        f"{cells}</table><p>Each function is held out: training never saw it. Grey is given; the first line behind it "
        'is <span class="good">green</span> where it parses, <span class="bad">red</span> where it does not; what is '
        "behind the function's end, or was cut off, is pale.</p>" + articles,
        encoding="utf-8", errors="replace",
    )  # fmt: skip


def _heading(report: dict) -> str:
    training = report["training"]
    what = f"{report['beginnings']} functions of {report['data']}"
    if training:
        what += (
            f"; GPT-2 of {training['parameters'] / 1e6:.1f} million parameters from random weights, "
            f"{training['steps']:,} steps of {training['tokens_per_step']:,} tokens, "
            f"{training['seconds'] / 60:.0f} minutes"
        )
    return what + f"; {report['machine']}"


def _articles(begun: Sequence[Beginning], before: Sequence[str], after: Sequence[str]) -> Iterator[str]:
    for number, (one, *texts) in enumerate(zip(begun, before, after, strict=True), 1):
        columns = "".join(
            f"<div><h3>{name}: {_verdict(one, text)}</h3><pre>{_coloured(one, text)}</pre></div>"
            for name, text in zip((*COLUMNS, "true"), (*texts, one.rest), strict=True)
        )
        yield (
            f'<article><h2>{number}</h2><pre class="begun">{_escaped(_end_of(one.begun))}</pre>'
            f'<div class="columns">{columns}</div></article>'
        )


def _verdict(one: Beginning, text: str) -> str:
    completion = scoring.completion_of(one.begun, text)
    line = scoring.next_line_of(text)
    if line is not None and line.rstrip() == one.next_line.rstrip():
        said = "the true next line"
    else:
        said = "the next line parses" if line is not None and scoring.line_parses(line) else "no line that parses"
    how: dict[str, Callable] = {"compiles": scoring.function_compiles, "parses": scoring.function_parses}
    found = next((word for word, holds in how.items() if holds(one.begun, completion)), "does not parse")
    return f"{said}; the function {found}"


def _coloured(one: Beginning, text: str) -> str:
    """Returns HTML: the first line coloured by whether it parses, the text behind the function pale."""
    line, completion = scoring.next_line_of(text), scoring.completion_of(one.begun, text)
    kept = completion if line is not None and line in completion else ""
    if not kept:
        return f'<span class="bad">{_escaped(text)}</span>'
    start = kept.index(line)
    colour = "good" if scoring.line_parses(line) else "bad"
    return (
        _escaped(kept[:start]) + f'<span class="{colour}">{_escaped(line)}</span>' + _escaped(kept[start + len(line) :])
        + f'<span class="rest">{_escaped(text[len(kept) :])}</span>'
    )  # fmt: skip


def _end_of(begun: str) -> str:
    lines = begun.rstrip("\n").splitlines()
    return "\n".join((["..."] if len(lines) > SHOWN_LINES else []) + lines[-SHOWN_LINES:])


def _escaped(text: str) -> str:
    # A model may write anything, so control characters become boxes.
    shown = "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
    return html.escape(shown)
