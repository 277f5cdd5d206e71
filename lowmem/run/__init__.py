"""A run's life, from what was typed to its exit code.

main.py parses (cli.py, options.py) and runs train.py, the loop, which reads top to bottom: plan, load, step, evaluate,
save, report. Beside it checkpoint.py, recovery.py and smaller_layouts.py (out of memory), signals.py, learning_rate.py,
log.py, plots.py and report.py; plan_command.py is `python -m lowmem.plan`, api.py what
`import lowmem` offers. Start with train.py.
"""
