"""One command that turns a few minutes of a GPU into rows: is it right, how fast is it, against what.

    python3 -m experiments.gpu_acceptance [--minutes 9] [--out DIR] [--only NAME ...] [--again] [--dry-run]

What the sections answer, and how long they should take on an H200 with 16 cores (estimated: none has run there; by
its plans an RTX 3060 takes about 18 times as long to train):

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
    plans         simulated peaks, smallest caps and choices against really run steps, layout by layout       3 min

jobs.py has the jobs in order of value, which is not that of the sections: nine minutes of an H200 have correctness,
Large and XL exact, and some of Large's denominator; the same command goes on from there. On a card of one's own give it
an hour or more (`--minutes 120`): nothing is lost where it ends earlier. About half a minute of each training is its
plan. A training saves and exports as a user's does: XL needs 28 GB of disk where temporary files lie (TMPDIR), which
are free again after each job.

Each job is a process of its own, and each of its cases (a model, a layout, a kernel) ends alone where it crashes, hangs
or exhausts the card: its row says how, and the job goes on with the next in a new process (experiments/harness/
progress.py). How long a case or a training may take follows from the seconds that are planned for it on this card:
three times as long, and two minutes. Before it has planned, a job has five minutes, and the peers, which plan nothing,
have three times what their arithmetic takes on this card on top.

Each row is appended as soon as it is measured, so an interrupted command keeps its rows. A second call runs the jobs
that are missing or failed, in the time that is left. A job needs at least a third of its limit to start. A training
writes its row after the second step and again at its end. The last row of a name counts; an interrupted one says
"complete": false. If a machine lacks something (bitsandbytes, a C compiler, bf16 below sm_80, where fp16 is measured),
a row says so or the case is left out. The rows' folder also has timeline_<job>.json and .png. `--dry-run` runs the same
lines with tiny shapes, on the CPU or on the stand-in for a GPU:

    .venv-cuda/bin/python -m stand_in --gpu rtx3060 --values -- -m experiments.gpu_acceptance --dry-run --minutes 30

It shows that they run; on the stand-in with CUDA's allocator, streams, events and page-locked memory, and with values
that the CPU computes. What compares times, compiles or asks a profiler is left out there. Its rows say what they are,
and are never mixed with measurements.

Not here yet: nested tensors, which are timed on the CPU alone (experiments/nested_tensors). `predicted.py` has what
plans say of speed, and table.py makes tables and a picture of both.

To add a section: a function(setting, **options) in a module here or in another experiment, and a Job in jobs.py.

No GPU has run it yet; README.md of the repository says what is known without one.
"""
