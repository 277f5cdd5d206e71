"""Random numbers that depend on their purpose, not on the process or the moment that draws them."""

_MASK = 2**63 - 1


def seed_of(*numbers: int) -> int:
    """Returns one seed for several whole numbers, such as a step, a micro-batch and a layer."""
    mixed = 0
    for number in numbers:  # the multiplier and the shifts of splitmix64
        mixed = (mixed + number + 1) * 0x9E3779B97F4A7C15 & (2**64 - 1)
        mixed ^= mixed >> 29
    return mixed & _MASK
