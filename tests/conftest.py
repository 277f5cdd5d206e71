"""Every test: one thread. The tensors are tiny, and threads that wait for one another cost far more than they save."""

import os

import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start
torch.set_num_threads(1)
