"""Simulates time with two clocks, of the host and of the GPU (docs/cuda-memory.md).

A Span of four numbers describes how a region (a sequence of operations) changes both. So a region is recorded once and
replayed in constant time.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """Describes how a region (a sequence of operations) changes the host's time h and the GPU's time g, in seconds. At
    g the GPU will have finished all launched work.

        h' = max(h + host, g + wait)
        g' = max(h + lead, g + gpu)
    """

    host: float  # work of the host
    gpu: float  # work of the GPU
    lead: float  # from the region's start on the host until an idle GPU is done; -inf without kernels
    wait: float = -math.inf  # from g until the host is done; -inf if the host does not wait for the GPU

    @staticmethod
    def of_operation(host: float, gpu: float) -> "Span":
        """Returns the span of one operation, which keeps the host busy for `host` seconds and the GPU for `gpu`
        seconds. If `gpu` is 0, no kernel is launched."""
        return Span(host, gpu, host + gpu if gpu > 0 else -math.inf)

    def then(self, other: "Span") -> "Span":
        """Returns the span of this region (a sequence of operations) followed by the region `other`."""
        return Span(
            host=max(self.host + other.host, self.lead + other.wait),
            gpu=max(self.gpu + other.gpu, self.wait + other.lead),
            lead=max(self.lead + other.gpu, self.host + other.lead),
            wait=max(self.wait + other.host, self.gpu + other.wait),
        )


NOTHING = Span(0.0, 0.0, -math.inf)
SYNCHRONIZE = Span(0.0, 0.0, -math.inf, wait=0.0)  # the host waits for the GPU, as in `.item()`


class Clock:
    """Keeps the simulated times of the host and of the GPU, in seconds."""

    def __init__(self):
        self.host = 0.0  # the present time of the host
        self.gpu = 0.0  # when the compute stream will have finished all work launched so far

    def advance(self, span: Span) -> None:
        self.host, self.gpu = (
            max(self.host + span.host, self.gpu + span.wait),
            max(self.gpu + span.gpu, self.host + span.lead),
        )

    def wait(self, until: float) -> None:
        # the compute stream waits; the host does not
        self.gpu = max(self.gpu, until)
