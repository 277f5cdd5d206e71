"""A card that is not there: the CUDA build of PyTorch, and this project on it, on a machine without a GPU.

PyTorch's own libraries run as they are: the caching allocator, the dispatcher, autograd's threads, the host code of
every kernel. Below them, libraries that model a card replace CUDA's (card/*.c). They track addresses and
limits of memory, streams, events, page-locked and managed memory, properties. Kernels are counted and not run.
Two more things are optional:

    values   the CPU computes each operator of a training step and writes its result to the kernel's output memory
             (values.py, counterparts.py)
    orders   streams run in other orders than the calls, as far as events allow it (card/streams.c)

This shows peaks of memory in that build of PyTorch, missing waits between streams, and the values that the CUDA path
leaves with the CPU's arithmetic. It cannot show time, the arithmetic of real kernels, the choices of cuBLAS and cuDNN,
or the memory of a CUDA context.

    make stand-in
    .venv-cuda/bin/python -m stand_in --gpu rtx3060 -- train_gpt2_large.py --init random --steps 2 --fixed-batch

Start reading in __main__.py.
"""
