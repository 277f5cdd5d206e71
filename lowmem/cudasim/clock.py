"""Simulates time with two clocks: the host's clock h, and the time g at which the GPU will have finished all launched
work.

Four numbers describe how a region (a sequence of operations) changes both clocks:

    h' = max(h + host, g + wait)
    g' = max(h + lead, g + gpu)

    host, gpu    seconds of work of the host and of the GPU
    lead         seconds from the region's start on the host until an idle GPU is done; -inf without kernels
    wait         seconds from g until the host is done, if the host waits for the GPU in the region; else -inf

So a region is recorded once and replayed in constant time (docs/cuda-memory.md).
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """Describes how a region (a sequence of operations) changes two clocks: the host's time h, and the time g at which
    the GPU will have finished all launched work. They become max(h + host, g + wait) and max(h + lead, g + gpu).
    `host`, `gpu`: seconds of work. `lead`: seconds from the region's start on the host until an idle GPU is done; -inf
    without kernels. `wait`: seconds from g until the host is done; -inf if the host does not wait for the GPU."""

    host: float
    gpu: float
    lead: float
    wait: float = -math.inf

    @staticmethod
    def of_operation(host: float, gpu: float) -> "Span":
        """Returns the effect of one operation on the clocks of host and GPU. The operation takes the host `host`
        seconds and the GPU `gpu` seconds. If `gpu` is 0, no kernel is launched."""
        return Span(host, gpu, host + gpu if gpu > 0 else -math.inf)

    def then(self, other: "Span") -> "Span":
        """Returns the effect on the clocks of this region (a sequence of operations) followed by the region `other`."""
        return Span(
            host=max(self.host + other.host, self.lead + other.wait),
            gpu=max(self.gpu + other.gpu, self.wait + other.lead),
            lead=max(self.lead + other.gpu, self.host + other.lead),
            wait=max(self.wait + other.host, self.gpu + other.wait),
        )


NOTHING = Span(0.0, 0.0, -math.inf)
SYNCHRONIZE = Span(0.0, 0.0, -math.inf, wait=0.0)  # the host waits for the GPU, as in `.item()`


class Clock:
    """Keeps two simulated times in seconds. `host` is the present time of the host. `gpu` is the time at which the
    compute stream will have finished all work launched so far."""

    def __init__(self):
        self.host = 0.0
        self.gpu = 0.0

    def advance(self, span: Span) -> None:
        self.host, self.gpu = (
            max(self.host + span.host, self.gpu + span.wait),
            max(self.gpu + span.gpu, self.host + span.lead),
        )

    def wait(self, until: float) -> None:
        """Makes the compute stream wait until the time `until`; the host does not wait."""
        self.gpu = max(self.gpu, until)
