"""Trains one optimizer step of a decoder, wherever its numbers are.

In: a decoder (decoder.py), its flat parameters (parameters.py), a batch (batch.py), a layout (layout.py). Out: updated
weights, a loss and a norm. Only the size of the micro-batches changes a bit of them. Start with step.py, which has the
order, and operations.py, which has the operations. final_gradients.py, deferred_updates.py and window.py make the
updates. recompute.py and products.py are activation checkpointing. loss.py and logits.py are the head. precision.py and
layers.py have the dtypes. kernels/ has fused versions. Nothing here knows files, plans or cards, and all of it runs on
the CPU, too. No line has run on a real GPU yet.
"""
