"""What trains: one optimizer step of a decoder, and where its numbers lie.

In: a decoder (decoder.py), its flat parameters (parameters.py), a batch (batch.py), a layout (layout.py). Out: updated
weights, a loss and a norm. No layout changes a bit of them but by the size of its micro-batches. Start with step.py,
which says in which order things happen, and operations.py, which says what each of them is; then final_gradients.py,
deferred_updates.py and window.py for the updates and the optimizer states, recompute.py and products.py for activation
checkpointing, loss.py and logits.py for the head, precision.py and layers.py for dtypes, accumulation.py for gradients
that are added once though a part is repeated. kernels/ has the fused ones. Knows nothing of files, plans or cards; runs
on the CPU too. No line of it has run on a real GPU yet.
"""
