"""Makes optimizer steps of a language model. Stores the model's weights, gradients and optimizer states.

A step takes a model that is split into embedding, blocks and head (decoder.py), parameters in flat tensors
(parameters.py), a batch (batch.py) and a layout (layout.py). The layout says how the batch is cut, what is recomputed,
and where numbers are stored. The step updates the weights, and returns the loss and the gradients' norm. Read
docs/step.md first. Then read step.py for the order of the operations, and operations.py for the operations. window.py
copies numbers between the device and RAM or a disk. Nothing in this package reads a user's files, plans memory use or
needs a GPU.
"""
