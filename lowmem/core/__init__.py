"""Makes optimizer steps of a language model, and stores its weights, gradients and optimizer states. Read docs/step.md
first, then step.py and operations.py. Nothing here reads a user's files, plans memory use or needs a GPU."""
