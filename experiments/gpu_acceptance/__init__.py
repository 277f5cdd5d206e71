"""One command that turns a few minutes of a GPU into rows: is it right, how fast is it, against what.

    python3 -m experiments.gpu_acceptance [--minutes 9] [--out DIR] [--only NAME ...] [--again] [--dry-run]

What the sections answer, and how long they should take on an H200 with 16 cores (estimated: none has run there):

    correctness   are the bits those of the plain arrangement, the kernels' those of the CPU or near fp32?    1 min
    train         GPT-2-Large and XL by their own scripts, 64 x 1,024 tokens under 11 GiB (XL: and 16 GiB of
                  RAM), exact, 8-bit, without clipping: speed, peaks and RAM beside the plan's; and what the
                  update adds to a step, with a timeline of copies and compute                                9 min
    denominator   what the card does at most: stock transformers, forward and backward in bf16 autocast, its
                  best micro-batch, eager and compiled, without a cap and under the same                      7 min
    memory        a plan for each of 14 models of ten families beside what it takes, signed; plain training
                  beside experiments/memory_estimation's prediction                                           4 min
    peers         GPT-2-Large by what else one would pick, 20 steps each (experiments/peers); what is not
                  installed says so                                                                          15 min
    plans         simulated peaks, smallest caps and choices against really run steps, layout by layout       3 min

jobs.py has the jobs in order of value, which is not that of the sections: nine minutes have correctness, Large and XL
exact, and Large's denominator; the same command goes on from there. About half a minute of each training is its plan.

Each job is a process of its own with a time limit: a crash, a hang, an exhausted card end that job and no other. Rows
are appended one by one as they are found out, so whatever ends the command, what was measured is kept, and a second
call goes on with what is missing or did not hold, in time that is left: a job is not begun with less than a third of
its limit. What a machine lacks (bitsandbytes, a C compiler) is a row that says so. Beside the rows lie
timeline_<job>.json and .png. `--dry-run` runs the same lines with tiny shapes, on the CPU or on the stand-in for a GPU:

    .venv-cuda/bin/python -m stand_in --gpu rtx3060 --values -- -m experiments.gpu_acceptance --dry-run --minutes 30

It shows that they run; on the stand-in with CUDA's allocator, streams, events and page-locked memory, and with values
that the CPU computes. What compares times, compiles or asks a profiler is left out there. Its rows say what they are,
and are never mixed with measurements.

Not here yet: unified memory and nested tensors, whose experiments are not there either. `predicted.py` has what plans
say of speed, and table.py makes tables and a picture of both.

To add a section: a function(setting, **options) in a module here or in another experiment, and a Job in jobs.py.

No GPU has run it yet; README.md of the repository says what is known without one.
"""
