"""Makes the tables of tables.md and the verdict of README.md: `python -m experiments.memory_estimation.table`."""

import statistics
import sys
from collections.abc import Iterable

from experiments.harness.models import MODELS
from experiments.harness.options import without_options
from experiments.harness.rows import is_measured
from experiments.harness.tables import Page, markdown, put_all, runs_twice
from experiments.memory_estimation import ram
from experiments.memory_estimation import rows as row_file
from experiments.memory_estimation.estimate import SMALLEST
from experiments.memory_estimation.several_gpus import published as several_gpus
from lowmem.units import GIB

BEGIN = "<!-- made by python -m experiments.memory_estimation.table -->"
README, TABLES = row_file.FOLDER / "README.md", row_file.FOLDER / "tables.md"
RESULTS = row_file.FOLDER / "results"
FILES = (row_file.NAME, ram.NAME, several_gpus.NAME)
NAMES = {"fp32": "plain fp32", "bf16": "plain bf16 autocast", "lowmem": "lowmem"}


def tables(rows: list[dict]) -> str:
    predicted = [row for row in rows if row["kind"] == "predicted"]
    parts = []
    for seq in sorted({row["seq"] for row in predicted if row["method"] in NAMES}):
        parts.append(f"**{seq} tokens per sequence**, predicted, GiB\n\n{_predicted_table(predicted, seq)}")
    parts.append(f"**The smallest caps under which lowmem trains**, predicted, GiB\n\n{_smallest_table(predicted)}")
    parts.append(f"**LLMem's own cases** (V100-16GB, 512 tokens), MiB\n\n{_llmem_table(predicted)}")
    parts.append(f"**Runs on several GPUs that others measured**, GiB per GPU\n\n{_published_table(rows)}")
    parts.append(_published_notes(rows))
    parts.append(f"**Measured**\n\n{_measured_table(rows)}")
    parts.append(f"**RAM of training runs on the CPU**, GiB\n\n{ram_table(rows)}")
    return "\n\n".join(parts)


def verdict(rows: list[dict]) -> str:
    runs = [row for row in rows if row["kind"] == several_gpus.KIND]
    rows, sentences = [row for row in rows if row["kind"] == "predicted"], []
    for seq in sorted({row["seq"] for row in rows if row["method"] in NAMES}):
        first = [row for row in rows if row["method"] in NAMES and row["seq"] == seq and row["batch"] in (1, None)]
        fitting = {method: sum(r["method"] == method and r.get("fits", False) for r in first) for method in NAMES}
        count = len({row["model"] for row in first})
        said = ", ".join(f"{NAMES[method]} {number}" for method, number in fitting.items())
        sentences.append(f"With {seq} tokens a batch of one fits into the cap for this many of {count} models: {said}.")
    shares = []
    for row in rows:
        if row["method"] == "accelerate" and row["answer"] is not None:
            answer = row["answer"]["float32"]["training_with_adam"]
            shares += [{r["batch"]: answer / r["allocated_peak_bytes"] - 1 for r in rows if _is_plain(r, row["model"])}]
    ones = [share[1] for share in shares if 1 in share]
    last = [share[max(share)] for share in shares if share]
    if ones:
        sentences.append(
            f"accelerate's fp32 answer differs by {_span(ones)} from plain fp32 training at batch 1, and by "
            f"{_span(last)} at the last batch of the rows: it counts weights, gradients and states, but no activations."
        )
    cases = [row for row in rows if row["method"] == "llmem"]
    if cases:
        sentences.append(
            f"In LLMem's own recipe, at the batch that its formula implies, our allocated bytes and its context differ "
            f"by {_span([row['error'] for row in cases])} from its measurement. LLMem's own error is "
            f"{_span([row['published_error'] for row in cases])}; DNNMem's, by LLMem's Table 2, is "
            f"{cases[0]['dnnmem_errors'][0]:.1%} to {cases[0]['dnnmem_errors'][1]:.1%} in size."
        )
    if runs:
        sentences.append(_published_verdict(runs))
    return "\n".join(f"- {sentence}" for sentence in sentences)


def _published_verdict(runs: list[dict]) -> str:
    spans = []
    for method in dict.fromkeys(row["method"] for row in runs):
        own = [row for row in runs if row["method"] == method and row["measured"]]
        plain, held = ([e for row in own for e in row[name].values()] for name in ("errors", "errors_with_held"))
        if len(plain) > 1:
            spans.append(f"{method} {_span(plain)} ({_span(held)})")
        else:
            spans.append(f"{method} {plain[0]:+.1%} ({held[0]:+.1%})")
    out = [row for row in runs if not row["measured"]]
    return (
        "On several GPUs, predicted peaks of PyTorch's own methods differ from published measurements: "
        f"{', '.join(spans)}. The figures in brackets count what the run's own code is known to hold besides. "
        f"Of {len(out)} published runs that ran out of memory, {sum(not row['fits'] for row in out)} do not fit here."
    )


def _is_plain(row: dict, model: str) -> bool:
    return (row["model"], row["method"], row.get("seq")) == (model, "fp32", 512)


def _span(errors: list[float]) -> str:
    return f"{min(errors):+.1%} to {max(errors):+.1%}"


def _predicted_table(rows: list[dict], seq: int) -> str:
    header = (
        "model", "parameters", "accelerate: Adam fp32 / fp16",
        "fp32: batch 1", "fp32: largest", "bf16: batch 1", "bf16: largest", "lowmem: batch 1", "lowmem: largest",
    )  # fmt: skip
    lines = []
    for name in MODELS:
        cases = {method: [r for r in rows if (r["model"], r["method"], r.get("seq")) == (name, method, seq)]
                 for method in NAMES}  # fmt: skip
        if not any(cases.values()):
            continue
        cells = [name, _parameters(name), _accelerate(rows, name)]
        for method in NAMES:
            cells += _smallest_and_largest(cases[method])
        lines.append(cells)
    return markdown(header, lines)


def _smallest_table(rows: list[dict]) -> str:
    rows = [row for row in rows if row["method"] == SMALLEST]
    cases = sorted({(row["seq"], row["batch"]) for row in rows if row["batch"] is not None})
    header = ["model", "16 bytes per parameter", "states in RAM", *(f"{batch} x {seq}" for seq, batch in cases)]
    lines = []
    for name in MODELS:
        own = {(row["seq"], row["batch"]): row for row in rows if row["model"] == name}
        if not own:
            continue
        refused = next((row["refused"] for row in own.values() if "refused" in row), None)
        if refused:
            lines.append([name, "", "", f"refused: {refused}", *[""] * (len(cases) - 1)])
            continue
        in_ram = max(row["streamed_bytes"] for row in own.values())
        parameters = MODELS[name].parameters
        lines.append([
            name, f"{16 * parameters / GIB:.2f}" if parameters else "not confirmed", f"{in_ram / GIB:.2f}",
            *(f"{own[case]['smallest_cap_bytes'] / GIB:.2f}" if case in own else "" for case in cases),
        ])  # fmt: skip
    return markdown(header, lines)


def _smallest_and_largest(rows: list[dict]) -> list[str]:
    if not rows:
        return ["", ""]
    if "refused" in rows[0]:
        return [f"refused: {rows[0]['refused']}", ""]
    fitting = [row for row in rows if row["fits"]]
    largest = max(fitting, key=lambda row: row["batch"], default=None)
    return [_sizes(rows[0]), "none" if largest is None else f"{largest['batch']}: {_sizes(largest)}{_choice(largest)}"]


def _sizes(row: dict) -> str:
    if "smallest_cap_bytes" in row:
        return f"(cap {row['smallest_cap_bytes'] / GIB:.2f})"
    sizes = " / ".join(f"{row[f'{kind}_peak_bytes'] / GIB:.2f}" for kind in ("allocated", "reserved"))
    return sizes if row["fits"] else f"({sizes})"


def _choice(row: dict) -> str:
    choice = row.get("choice")
    if choice is None:
        return ""
    group = f" x {choice['group']}" if choice["group"] > 1 else ""
    kept = "" if choice["recompute"] else ", nothing recomputed"
    if choice.get("product_blocks") or choice.get("whole_blocks"):  # rows from before there was one number
        kept = f", products of {choice['product_blocks']} blocks and {choice['whole_blocks']} whole blocks kept"
    elif choice["recompute"] and choice.get("kept"):
        kept = f", kept {choice['kept']} of {2 * choice['blocks']}"
    return f"; micro-batch {choice['micro_batch']}{group}{kept}, {choice['streamed_bytes'] / GIB:.1f} in RAM"


def _parameters(name: str) -> str:
    parameters = MODELS[name].parameters
    return f"{parameters:,}" if parameters else "not confirmed"


def _accelerate(rows: list[dict], name: str) -> str:
    row = next((row for row in rows if (row["model"], row["method"]) == (name, "accelerate")), None)
    if row is None or row["answer"] is None:
        return "not installed"
    return " / ".join(f"{row['answer'][kind]['training_with_adam'] / GIB:.2f}" for kind in ("float32", "float16"))


def _llmem_table(rows: list[dict]) -> str:
    header = (
        "model", "measured by LLMem", "predicted by LLMem", "its error", "its batch, derived",
        "ours at that batch: allocated + context", "our error", "ours under the card's cap: largest batch, used",
    )  # fmt: skip
    lines = [
        [
            row["model"], f"{row['published_measured_mib']:,}", f"{row['published_predicted_mib']:,}",
            f"{row['published_error']:+.1%}", f"{row['batch_derived']:.1f}", f"{row['allocated_and_base_mib']:,}",
            f"{row['error']:+.1%}",
            "none" if row["used_mib"] is None else f"{row['largest_batch']}, {row['used_mib']:,}",
        ]
        for row in sorted(rows, key=lambda row: list(MODELS).index(row["model"]))
        if row["method"] == "llmem"
    ]  # fmt: skip
    return markdown(header, lines)


def _published_table(rows: list[dict]) -> str:
    header = (
        "run", "model", "method", "GPUs", "tokens", "micro-batch", "measured", "kind", "predicted", "error",
        "with what its code holds besides", "fits its card",
    )  # fmt: skip
    lines = []
    for row in _published(rows):
        case = [row["name"], row["model"], row["method"], *(str(row[name]) for name in ("ranks", "seq", "batch"))]
        fits = "yes" if row["fits"] else "no"
        if not row["measured"]:
            lines.append([*case, "out of memory", "", f"{row['reserved_peak_bytes'] / GIB:.2f}", "", "", fits])
        for kind, size in row["measured"].items():
            predicted = row[f"{several_gpus.COMPARED[kind]}_peak_bytes"]
            held = f"{row['errors_with_held'][kind]:+.1%}" if row["held"] else ""
            sizes = [f"{size / GIB:.2f}", kind, f"{predicted / GIB:.2f}", f"{row['errors'][kind]:+.1%}", held, fits]
            lines.append([*case, *sizes])
    return markdown(header, lines)


def _published_notes(rows: list[dict]) -> str:
    notes: dict[str, list[str]] = {}
    for row in _published(rows):
        held = "".join(f"; it holds {size / GIB:.2f} GiB of {what}" for what, size in row["held"].items())
        note = f"{row['settings']}. Differs: {row['differs']}{held}. Not known: {row['unknown']}. {row['source']}"
        notes.setdefault(note, []).append(row["name"])
    return "\n".join(f"- *{', '.join(names)}*: {note}" for note, names in notes.items())


def _published(rows: list[dict]) -> list[dict]:
    names = list(several_gpus.RUNS)
    return sorted((r for r in rows if r["kind"] == several_gpus.KIND), key=lambda row: names.index(row["name"]))


def _measured_table(rows: list[dict]) -> str:
    pairs = list(_pairs(rows))
    if not pairs:
        return "No GPU has run these cases yet: `python -m experiments.memory_estimation.run --measure` on one does."
    header = ("card", "model", "method", "tokens", "batch", "predicted", "measured", "allocated", "reserved")
    lines = [
        [
            said["card"], said["model"], NAMES[said["method"]], str(said["seq"]), str(said["batch"]), _sizes(said),
            _sizes(was) if was["fits"] else was.get("error", "out of memory"),
            *(_signed(said, was, kind) for kind in ("allocated", "reserved")),
        ]
        for said, was in pairs
    ]  # fmt: skip
    return markdown(header, lines)


def _pairs(rows: list[dict]) -> Iterable[tuple[dict, dict]]:
    said = {row_file.key(row)[1:]: row for row in rows if row["kind"] == "predicted"}
    for row in rows:
        if row["kind"] == "measured" and row_file.key(row)[1:] in said:
            yield said[row_file.key(row)[1:]], row


def _signed(said: dict, was: dict, kind: str) -> str:
    name = f"{kind}_peak_bytes"
    return f"{said[name] / was[name] - 1:+.2%}" if said["fits"] and was["fits"] else ""


def ram_table(rows: list[dict]) -> str:
    runs = [row for row in rows if row["kind"] == "trained"]
    if not runs:
        return "None has run yet: `python -m experiments.memory_estimation.ram` does."
    header = ("model", "parameters", "predicted", "measured", "error", "layout", "forward and backward", "s per step")
    lines = [
        [
            row["model"], f"{row['parameters']:,}", f"{row['predicted_ram_peak_bytes'] / GIB:.2f}",
            f"{row['ram_peak_bytes'] / GIB:.2f}",
            f"{row['predicted_ram_peak_bytes'] / row['ram_peak_bytes'] - 1:+.1%}",
            _cpu_layout(row["choice"]), "twice" if runs_twice(row["choice"]) else "once",
            f"{row['step_seconds']:.1f}",
        ]
        for row in sorted(runs, key=lambda row: row["parameters"])
    ]  # fmt: skip
    return markdown(header, lines)


def _cpu_layout(choice: dict) -> str:
    kept = f"{choice['segment_blocks']} blocks recomputed at a time" if choice["recompute"] else "nothing recomputed"
    return f"micro-batch {choice['micro_batch']}, {kept}"


def summary(rows: list[dict]) -> dict:
    """Returns signed errors of measurements, and plans that contradict the GPU, for report.json."""
    pairs = [(said, was) for said, was in _pairs(rows) if was["fits"] is not None]
    both = [(said, was) for said, was in pairs if said["fits"] and was["fits"]]
    errors = {
        kind: [said[f"{kind}_peak_bytes"] / was[f"{kind}_peak_bytes"] - 1 for said, was in both]
        for kind in ("allocated", "reserved")
    }
    return {
        "predicted_rows": sum(row["kind"] == "predicted" for row in rows),
        "measured_rows": sum(row["kind"] == "measured" for row in rows),
        "fitted_against_the_prediction": sum(was["fits"] and not said["fits"] for said, was in pairs),
        "ran_out_of_memory_against_the_prediction": sum(said["fits"] and not was["fits"] for said, was in pairs),
        "signed_errors": {
            kind: {"lowest": min(found), "median": statistics.median(found), "highest": max(found)}
            for kind, found in errors.items()
            if found
        },
    }


def committed_rows() -> list[dict]:
    """Returns all committed rows but the stand-in's."""
    return [row for name in FILES for row in row_file.read(RESULTS / name) if is_measured(row)]


def pages() -> list[Page]:
    return [(README, BEGIN, verdict(committed_rows())), (TABLES, BEGIN, tables(committed_rows()))]


def main() -> None:
    put_all(pages())


if __name__ == "__main__":
    sys.exit(without_options("experiments.memory_estimation.table", __doc__, main))
