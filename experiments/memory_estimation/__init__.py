"""How much GPU memory does training take? Predicted without a GPU, beside what others predict and what a GPU says.

    python -m experiments.memory_estimation.run [--only MODEL ...] [--measure] [--out DIR]

Two ways to train each of the models: the ordinary one of `transformers` (plain.py; autocast's rules in
autocast.py) and lowmem's own step. Both run on tensors without data and are replayed through the model of CUDA's
allocator under a cap (estimate.py). Others' figures are in published.py, real runs in measure.py, the rows' file in
rows.py, the README's tables and the picture in table.py.
"""
