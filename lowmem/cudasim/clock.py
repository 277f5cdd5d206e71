"""Simulated time: the host's clock and the GPU's.

PyTorch launches a kernel and goes on. So an operation that costs the host c seconds and then the GPU t > 0 seconds
moves the host's clock h, and the GPU's clock g when all launched work is done, to

    h' = h + c
    g' = max(g, h') + t                        the kernel waits for its launch and for the kernels before it

An operation without a kernel (a view) moves h alone. Reading a number back makes the host wait: h' = max(h, g). Such
maps are linear over (max, +), so they compose. The effect of a region of operations on both clocks is four numbers:

    h' = max(h + host, g + wait)
    g' = max(h + lead, g + gpu)                lead: when an idle GPU would be done, from the region's start on the host

A region is therefore recorded once and replayed in constant time (Baccelli et al., Synchronization and Linearity,
1992). Left out: several compute streams, and a full launch queue. CUDA holds about 1,024 launches; the host is ahead by
then.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """A region's effect on the clocks, in seconds: see the module's docstring."""

    host: float
    gpu: float
    lead: float
    wait: float = -math.inf

    @staticmethod
    def of_operation(host: float, gpu: float) -> "Span":
        """`host` seconds on the host, then `gpu` seconds on the GPU; `gpu` 0 means that no kernel is launched."""
        return Span(host, gpu, host + gpu if gpu > 0 else -math.inf)

    def then(self, other: "Span") -> "Span":
        """This region followed by `other`."""
        return Span(
            host=max(self.host + other.host, self.lead + other.wait),
            gpu=max(self.gpu + other.gpu, self.wait + other.lead),
            lead=max(self.lead + other.gpu, self.host + other.lead),
            wait=max(self.wait + other.host, self.gpu + other.wait),
        )


NOTHING = Span(0.0, 0.0, -math.inf)
SYNCHRONIZE = Span(0.0, 0.0, -math.inf, wait=0.0)  # the host waits for the GPU, as `.item()` makes it do


class Clock:
    """`host`: now; `gpu`: when everything launched on the compute stream so far will be done. Seconds."""

    def __init__(self):
        self.host = 0.0
        self.gpu = 0.0

    def advance(self, span: Span) -> None:
        """Runs a region."""
        self.host, self.gpu = (
            max(self.host + span.host, self.gpu + span.wait),
            max(self.gpu + span.gpu, self.host + span.lead),
        )

    def wait(self, until: float) -> None:
        """The compute stream waits until a point in time; the host does not."""
        self.gpu = max(self.gpu, until)
