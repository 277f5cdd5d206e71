"""Which of PyTorch's methods for several GPUs (DDP, FSDP2, tensor parallelism) fits. Start with methods.py."""
