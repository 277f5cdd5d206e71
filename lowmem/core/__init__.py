"""Makes optimizer steps of a decoder, and stores its weights, gradients and optimizer states.

A step takes a decoder (decoder.py), its parameters in flat tensors (parameters.py), a batch (batch.py) and a layout
(layout.py). It updates the weights, and returns the loss and the gradients' norm. Read docs/step.md first. Then read
step.py for the order of the operations, and operations.py for the operations. window.py copies numbers from RAM or a
disk to the device and back. Nothing here reads a user's files, makes a plan or needs a GPU.
"""
