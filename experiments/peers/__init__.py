"""What would one pick instead of lowmem: does it fit the two caps, how fast is it, what does it do to the weights?

    python -m experiments.peers.run       the same training by every peer, and by lowmem, each under the same caps
    python -m experiments.peers.update    the optimizer's update alone, on this machine's CPU
    python -m experiments.peers.table     puts the tables of the rows in results/ into tables.md

    catalogue.py    who the peers are, what each needs and gives up
    train.py        a peer under the caps: the largest micro-batch that fits, each attempt in its own process
    attempt.py      that process: trains, measures memory, compares the weights with the uncapped reference
    shared.py       what is the same for all: weights to begin with, batches, plain PyTorch's loop
    trainings.py    the peers, each set up as its documentation advises
    memory.py       peaks of GPU and RAM, page-locked and managed memory counted
    updates.py      the updates that update.py times

Which of them ran, and on what machine, the rows in results/ say.
"""
