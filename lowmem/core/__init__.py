"""What trains: one optimizer step of a decoder, and where its numbers are stored.

In: a decoder (decoder.py), its flat parameters (parameters.py), a batch (batch.py), a layout (layout.py). Out: updated
weights, a loss and a norm. Read docs/step.md first, then step.py, which has the order of the operations, and
operations.py, which has the operations. window.py moves numbers between their homes and the device. This room knows
nothing of files, plans or cards, and runs on the CPU too. No line of it has run on a real GPU yet.
"""
