"""A card that is not there: the CUDA build of PyTorch, and this project on it, on a machine without a GPU.

PyTorch's own libraries run as they are: the caching allocator, the dispatcher, autograd's threads, the host code of
every kernel. Below them CUDA's libraries are replaced by ones that keep the books of a card (card/*.c): addresses and
limits of memory, streams, events, page-locked and managed memory, properties. Kernels are counted and not run.
Two things can be asked for beside that:

    values   the operators of a training step are computed by the CPU's, in the place where the kernel would have
             written (values.py, counterparts.py)
    orders   what streams and events allow to happen in another order does (card/streams.c)

What that shows: peaks of memory, as that build of PyTorch has them; whether streams are kept in order; what the CUDA
path does to the values, with the CPU's arithmetic. What it cannot show: time, the arithmetic of real kernels, what
cuBLAS and cuDNN choose, what a context takes of a card's memory.

    make stand-in
    .venv-cuda/bin/python -m stand_in --gpu rtx3060 -- train_gpt2_large.py --init random --steps 2 --fixed-batch

Start reading in __main__.py.
"""
