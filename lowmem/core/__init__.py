"""Makes optimizer steps of a language model, and stores its weights, gradients and optimizer states.

A step takes a model in pieces (decoder.py), its parameters in flat tensors (parameters.py), a batch (batch.py) and a
layout (layout.py). The layout says how the batch is cut, what is recomputed, and where numbers are stored. The step
updates the weights, and returns the loss and the gradients' norm. Read docs/step.md first. Then read step.py for the
order of the operations, and operations.py for the operations. window.py copies numbers from RAM or a disk to the device
and back. Nothing in this package reads a user's files, makes a plan or needs a GPU.
"""
