"""Measures correctness, speed and memory on a GPU by one command, within a given number of minutes.

    python3 -m experiments.gpu_acceptance [--minutes 9] [--out DIR] [--only NAME ...] [--again] [--dry-run]

The sections, and their estimated time on an H200 with 16 cores (an RTX 3060 trains about 18 times as long, by its
plans):

    correctness   a small model's whole life: killed, resumed, out of memory, not page-locked, exported, all with
                  the same bits; the bits of every arrangement, the kernels' errors                           2 min
    train         GPT-2-Large and XL by their own scripts, 64 x 1,024 tokens under 11 GiB (XL: and 16 GiB of
                  RAM), exact, 8-bit, without clipping: speed, peaks and RAM beside the plan's; and what the
                  update adds to a step, with a timeline of copies and compute                               12 min
    denominator   what the card does at most: stock transformers, forward and backward in bf16 autocast, its
                  best micro-batch, eager and compiled, without a cap and under the same                      7 min
    memory        a plan for each of 14 models of ten families beside what it takes, signed; plain training
                  beside experiments/memory_estimation's prediction                                           4 min
    peers         GPT-2-Large by what else one would pick, 20 steps each (experiments/peers); what is not
                  installed says so                                                                          15 min
    levers        a step of Large and of XL with and without single changes of its code                       1 min
    plans         simulated peaks, smallest caps and choices against really run steps, layout by layout       3 min

jobs.py has the jobs in order of value. Nine minutes of an H200 are enough for correctness, Large and XL exact, and part
of Large's denominator; the same command continues from there. On your own card give it an hour or more (`--minutes
120`); if it ends earlier, nothing is lost. Planning takes about half a minute of each training. A training saves and
exports as a user's does: XL needs 28 GB of disk for temporary files (TMPDIR) during its job.

Each job is a separate process. If a case (a model, a layout, a kernel) crashes, hangs or exhausts the card, its row
says how, and the job continues with the next case in a new process (experiments/harness/progress.py). The time limit of
a case or a training is three times its planned seconds on this card, and two minutes. Until a job has a plan, its limit
is five minutes. Peers have no plan: their limit is three times the time of their arithmetic, and five minutes.

Each row is appended as soon as it is measured, so an interrupted command keeps its rows. A second call runs the jobs
that are missing or failed, in the time that is left. A job needs at least a third of its limit to start. A training
writes its row after the second step and again at its end. The last row of a name counts; an interrupted one says
"complete": false. If a machine lacks something (bitsandbytes, a C compiler, bf16 below sm_80, where fp16 is measured),
a row says so or the case is left out. The rows' folder also has timeline_<job>.json and .png. `--dry-run` runs the same
lines with tiny shapes, on the CPU or on the stand-in for a GPU:

    .venv-cuda/bin/python -m stand_in --gpu rtx3060 --values -- -m experiments.gpu_acceptance --dry-run --minutes 30

This shows that they run; on the stand-in with CUDA's allocator, streams, events and page-locked memory, and with values
that the CPU computes. Cases that compare times, compile or need a profiler are left out there. Rows of dry runs are
marked, and never mixed with measurements.

Nested tensors are timed only on the CPU (experiments/nested_tensors). `predicted.py` has the speeds that plans predict,
and table.py makes tables and a picture of both.

To add a section: a function(setting, **options) in a module here or in another experiment, and a Job in jobs.py.

An H200 has run a part of it: docs/results.md has the tables, and names what failed.
"""
