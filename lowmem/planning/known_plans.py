"""Plans for GPUs that were made before, kept in files: the same question need not be simulated for minutes again.

A plan depends on the settings that are marked PLAN, the model's config, the precision, the card, whether it runs fused
kernels, and the versions of PyTorch, transformers and this package; all of that is hashed into a file's name. What the
process that trains holds of RAM differs a little from start to start, so it is no part of the question: a plan counts
again if it keeps to RAM's cap, and to what is free, with what is held now.

Files are in ~/.cache/lowmem/plans ($XDG_CACHE_HOME/lowmem/plans), or where LOWMEM_PLANS says; LOWMEM_PLANS=off keeps
none. A few hundred KiB each; they may be deleted at any time.
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path

import torch
from transformers import PretrainedConfig

from lowmem.core.layout import Layout
from lowmem.cudasim.gpus import Card
from lowmem.device import expandable_segments
from lowmem.files import to_json
from lowmem.planning.plan import Plan
from lowmem.planning.ram import PROCESS_VARIES_BYTES, Process
from lowmem.settings import PLAN, Settings, marked

MOST_KEPT = 100  # the newest; another version of this package finds none of them


@dataclass(frozen=True)
class Question:
    """What `make_plan` is asked, under its names; on the CPU plans are quick, follow what is free, and are not kept."""

    settings: Settings
    config: PretrainedConfig
    device: str
    precision: str
    card: Card | None
    ram_free_bytes: int | None = None
    fused_kernels: bool | None = None
    process: Process | None = None

    def answer(self, make: Callable[..., Plan]) -> Plan:
        """The plan, which is made by `make(*arguments of make_plan)` unless it is known; who waits for that at a
        terminal is told."""
        plan = self._known()
        if plan is None:
            if self.card is not None and sys.stderr is not None and sys.stderr.isatty():
                said = f"planning {self.settings.model} for {self.card.name}; a large model takes a minute or two, once"
                print(said, file=sys.stderr)
            plan = make(*(getattr(self, item.name) for item in fields(self)))
            self._keep(plan)
        return plan

    def _known(self) -> Plan | None:
        try:
            stored = json.loads(self._path().read_text(encoding="utf-8"))
            kept = stored["plan"]
            layout, timeline = Layout(**kept["layout"]), [tuple(row) for row in kept["timeline"]]
            roomy = kept["faster_with_ram"] and tuple(kept["faster_with_ram"])
            kept |= {"layout": layout, "timeline": timeline, "faster_with_ram": roomy}
            plan = Plan(**kept, settings=self.settings, card=self.card)
            return plan if self.process is None else self._with_this_process(plan, stored["process_bytes"])
        except (AttributeError, OSError, ValueError, TypeError, KeyError):  # there is none, or not what was written
            return None

    def _with_this_process(self, plan: Plan, before_bytes: int) -> Plan | None:
        """A plan for a process that held `before_bytes`, with what is held now; None where that asks for another."""
        held, grown = self.process, self.process.now_bytes - before_bytes
        prepare = {"prepare": {"process": held.peak_bytes}} if held.peak_bytes else {}
        phases = {phase: names for phase, names in plan.ram.items() if phase != "prepare"}
        ram = {phase: names | {"process": names["process"] + grown} for phase, names in phases.items()}
        plan = replace(plan, ram=prepare | ram)
        limit, free = self.settings.ram_limit_bytes, self.ram_free_bytes
        over_the_cap = limit is not None and plan.ram_bytes > limit
        not_free = free is not None and plan.ram_bytes - held.now_bytes > free
        faster_now = plan.seconds_with_more_ram is not None and grown < -PROCESS_VARIES_BYTES
        if plan.faster_with_ram is not None:
            needed = plan.faster_with_ram[0] + grown
            faster_now |= (limit is None or needed <= limit) and (free is None or needed - held.now_bytes <= free)
        return None if over_the_cap or not_free or faster_now else plan

    def _keep(self, plan: Plan) -> None:
        path = self._path()
        if path is None:
            return
        kept = {item.name: getattr(plan, item.name) for item in fields(plan) if item.name not in ("settings", "card")}
        kept["layout"] = asdict(plan.layout)
        with suppress(OSError):  # a plan that cannot be kept is made again
            path.parent.mkdir(parents=True, exist_ok=True)
            written = path.with_name(f".{path.name}.{os.getpid()}")
            try:
                written.write_bytes(to_json({"plan": kept, "process_bytes": self.process and self.process.now_bytes}))
                written.replace(path)
            finally:
                written.unlink(missing_ok=True)
            newest_first = sorted(path.parent.glob("*.json"), key=lambda plan: plan.stat().st_mtime, reverse=True)
            for old in newest_first[MOST_KEPT:]:
                old.unlink(missing_ok=True)

    def _path(self) -> Path | None:
        """The plan's file; None where none is kept."""
        folder = os.environ.get("LOWMEM_PLANS")
        if folder == "off" or self.card is None:
            return None
        if not folder:
            home = os.path.expanduser("~/.cache")  # which stays as it is where nobody has a home
            folder = Path(os.environ.get("XDG_CACHE_HOME") or home) / "lowmem/plans"
            if not folder.is_absolute():
                return None
        asked = {
            "settings": marked(self.settings, PLAN),
            "config": self.config.to_dict(),
            "precision": self.precision,
            "card": asdict(self.card),
            "fused_kernels": self.fused_kernels,
            "measured": self.process is not None,
            "gpu_here": [torch.cuda.is_available(), torch.cuda.is_initialized()],
            "expandable_segments": expandable_segments(),
            "workspaces": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
            "versions": [torch.__version__, version("transformers"), _sources()],
        }
        text = json.dumps(asked, sort_keys=True, default=str)
        return Path(folder) / f"{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}.json"


@cache
def _sources() -> str:
    """Of this package: another version of it may plan otherwise."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
