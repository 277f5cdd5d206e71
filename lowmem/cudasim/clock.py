"""Simulates time: the host's clock h, and the GPU's clock g at which it will have finished all launched work.

Four numbers describe the effect of any region of operations on both clocks:

    h' = max(h + host, g + wait)
    g' = max(h + lead, g + gpu)                lead: when an idle GPU would be done, from the region's start on the host

So a region is recorded once and replayed in constant time. docs/cuda-memory.md says why, and what is left out.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """A region's effect on the clocks, in seconds; the module's docstring has the formulas."""

    host: float
    gpu: float
    lead: float
    wait: float = -math.inf

    @staticmethod
    def of_operation(host: float, gpu: float) -> "Span":
        """Returns the effect of one operation: `host` seconds, then `gpu` seconds. No kernel is launched if `gpu` is
        0."""
        return Span(host, gpu, host + gpu if gpu > 0 else -math.inf)

    def then(self, other: "Span") -> "Span":
        """Returns the effect of this region followed by `other`."""
        return Span(
            host=max(self.host + other.host, self.lead + other.wait),
            gpu=max(self.gpu + other.gpu, self.wait + other.lead),
            lead=max(self.lead + other.gpu, self.host + other.lead),
            wait=max(self.wait + other.host, self.gpu + other.wait),
        )


NOTHING = Span(0.0, 0.0, -math.inf)
SYNCHRONIZE = Span(0.0, 0.0, -math.inf, wait=0.0)  # the host waits for the GPU, as `.item()` makes it do


class Clock:
    """Two clocks in seconds. `host` is now; at `gpu` the compute stream will have finished all launched work."""

    def __init__(self):
        self.host = 0.0
        self.gpu = 0.0

    def advance(self, span: Span) -> None:
        """Moves both clocks by a region."""
        self.host, self.gpu = (
            max(self.host + span.host, self.gpu + span.wait),
            max(self.gpu + span.gpu, self.host + span.lead),
        )

    def wait(self, until: float) -> None:
        """Makes the compute stream wait until a point in time; the host does not wait."""
        self.gpu = max(self.gpu, until)
