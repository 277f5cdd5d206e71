"""Computes --batch, the number of sequences in an optimizer step, from other trainers' options, such as Hugging Face's
per_device_train_batch_size x gradient_accumulation_steps."""

from collections.abc import Callable

from lowmem.errors import InputError

# Options that are no fields of Settings.
PER_DEVICE, AT_ONCE = "per_device_train_batch_size", "micro_batch_size"
ACCUMULATION = "gradient_accumulation_steps"


def with_batch(chosen: dict[str, object], spelled: dict[str, str], say: Callable[[str], None]) -> dict[str, object]:
    """Returns `chosen`, {option: value}, with AT_ONCE renamed to `micro_batch`. `batch` replaces PER_DEVICE (sequences
    in a micro-batch) and ACCUMULATION (micro-batches in a step). `spelled`: {option: its name as typed}. `say` gets a
    sentence if the batch was computed. Raises InputError if these options do not give a batch, or conflict."""
    chosen = dict(chosen)
    typed = {name: f"{spelled[name]} {value}" for name, value in chosen.items()}
    per_device, at_once, count = (chosen.pop(name, None) for name in (PER_DEVICE, AT_ONCE, ACCUMULATION))
    if at_once is not None:
        if per_device is not None or chosen.get("micro_batch", at_once) != at_once:
            raise InputError(f"{typed[AT_ONCE]} is the number of sequences that run at once: give it once.")
        chosen["micro_batch"] = at_once
    if count is None and per_device is None:
        if at_once is not None and "batch" not in chosen:
            raise InputError(
                f"{typed[AT_ONCE]} alone does not say how many sequences an optimizer step has: give --batch, too."
            )
        return chosen
    rows = chosen.get("micro_batch") if per_device is None else per_device
    if rows is None:
        raise InputError(
            f"{typed[ACCUMULATION]} multiplies sequences that run at once, and their number is not given: give --batch "
            "in its place, the sequences per optimizer step."
        )
    batch = rows * (count or 1)
    at_once_by = next(name for name in (PER_DEVICE, AT_ONCE, "micro_batch") if name in typed)
    said = " x ".join(typed[name] for name in (at_once_by, ACCUMULATION) if name in typed)
    if chosen.get("batch", batch) != batch:
        raise InputError(f"{said} is a batch of {batch}, and {typed['batch']} is another one: give one of them.")
    say(f"{said}: an optimizer step has {batch} sequence{'s' * (batch > 1)} (--batch {batch})")
    return chosen | {"batch": batch}
