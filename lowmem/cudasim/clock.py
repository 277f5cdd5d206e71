"""Simulated time of code on a GPU: the host's clock and the GPU's.

PyTorch launches a kernel and goes on, so a step has two clocks. An operation that costs the host c seconds and then
the GPU t > 0 seconds moves the host's clock h and the GPU's g (when all launched work is done) to

    h' = h + c
    g' = max(g, h') + t                        the kernel waits for its launch and for the kernels before it

and one without a kernel (a view) moves h alone; reading a number back makes the host wait, h' = max(h, g). Such maps
are linear over (max, +), so they compose: however many operations a region has, its effect on both clocks is a matrix
of four numbers,

    h' = max(h + host, g + wait)
    g' = max(h + lead, g + gpu)

`lead` is when the GPU would be done, counted from the region's start on the host, were it idle before. A region is
therefore recorded once and replayed in constant time (Baccelli et al., Synchronization and Linearity, 1992).

Left out: a launch queue that is full (CUDA holds about 1,024 launches, then the host waits; the host is then ahead
anyway, and only memory that the host frees later would show it), and several compute streams.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """What a region of operations does to the clocks, in seconds: see the module's docstring."""

    host: float
    gpu: float
    lead: float
    wait: float = -math.inf

    @staticmethod
    def of_operation(host: float, gpu: float) -> "Span":
        """`host` seconds on the host, then `gpu` seconds on the GPU; 0 there means that no kernel is launched."""
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
