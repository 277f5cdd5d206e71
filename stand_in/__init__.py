"""A card that is not there: the CUDA build of PyTorch, and this project on it, on a machine without a GPU.

PyTorch's own libraries run as they are: the caching allocator, the dispatcher, autograd's threads, the host code of
every kernel. Below them, libraries that model a card replace CUDA's (card/*.c). They track addresses and limits of
memory, streams, events, page-locked and managed memory, properties. Kernels are counted and not run. With --values the
CPU computes each operator of a training step (values.py, counterparts.py), and with --order streams run in other orders
than the calls, as far as events allow it (card/streams.c). docs/without-a-gpu.md says what this shows.

    make stand-in
    .venv-cuda/bin/python -m stand_in --gpu rtx3060 -- train_gpt2_large.py --init random --steps 2 --fixed-batch

Start reading in __main__.py.
"""
