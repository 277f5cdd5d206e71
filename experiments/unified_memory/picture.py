"""Draws the bytes on the GPU at each access of a pass."""

from pathlib import Path

from experiments.harness import pictures
from lowmem.units import GIB

DRAWN = (  # of a report of run_gpt2
    *("planned_resident_bytes", "used_bytes_by_access", "weights_bytes", "backward", "physical_limit_bytes"),
)


def draw_resident(report: dict, path: Path) -> None:
    """Draws a report of run_gpt2: bytes on the GPU by access, by the schedule and by CUDA's count, and the limit."""
    resident = [size / GIB for size in report["planned_resident_bytes"]]
    figure = pictures.figure(8, 3.5)
    axes = figure.subplots()
    what = "weights and gradients" if report["backward"] else "weights"
    axes.step(range(len(resident)), resident, where="mid", label=f"{what} on the GPU, by the schedule")
    whole = report["weights_bytes"] * (2 if report["backward"] else 1) / GIB
    axes.axhline(whole, color="grey", linestyle=":", label=f"all {what}")
    if used := [size / GIB for size in report["used_bytes_by_access"]]:
        axes.step(range(len(used)), used, where="mid", color="tab:green", label="in use in all, as CUDA counts")
    limit = report["physical_limit_bytes"]
    if limit and limit / GIB <= whole:
        axes.axhline(limit / GIB, color="tab:red", linestyle="--", label=f"limit of {what}")
    axes.set(xlabel="access: embeddings, blocks, head" + (", and back" if report["backward"] else ""), ylabel="GiB")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylim(0, max([whole, *used]) * 1.1)
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    pictures.save(figure, path)
