"""One command that turns a few minutes of a GPU into rows: is it right, how fast is it, against what.

    python3 -m experiments.gpu_acceptance [--minutes 9] [--out DIR] [--only NAME ...] [--again] [--dry-run]

Sections, in order of value:

    correctness   the bitwise invariants on the card, the kernels against the CPU's bits or fp32 truth
    plans         the simulated peaks, smallest caps and choices against really run steps, with signed errors
    train         GPT-2-Large and XL by their own scripts, 64 x 1,024 tokens under 11 GiB (XL: and 16 GiB of RAM)
    denominator   what the card does at most: stock transformers, forward and backward only, same cap and without

Each job is a process of its own with a time limit: a crash, a hang, an exhausted card end that job and no other. Rows
are appended one by one as they are found out (rows.py), so whatever ends the command, what was measured is kept, and a
second call goes on with what is missing. `--dry-run` runs the same lines on the CPU with tiny shapes; it shows that
they run, and its rows are never mixed with measurements.

To add a section: a function(setting, **options) in a module here, and a Job in jobs.py.

Everything CUDA here has never run on a GPU.
"""
