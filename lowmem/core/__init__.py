"""What trains: one optimizer step of a decoder, and where its numbers lie.

In: a decoder (decoder.py), its flat parameters (parameters.py), a batch (batch.py), a layout (layout.py). Out: updated
weights, a loss and a norm. No layout changes a bit of them. Start with step.py, which says
in which order things happen, and operations.py, which says what each of them is; then deferred_updates.py and
offload.py for the optimizer states, recompute.py for activation checkpointing, loss.py for the head, precision.py for
the weights. Knows nothing of files, plans or cards; runs on the CPU too. No line of it has run on a real GPU yet.
"""
