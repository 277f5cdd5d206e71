"""A run's life, from what was typed to its exit code.

main.py parses (cli.py, options.py) and runs train.py, the loop, which reads top to bottom: plan, load, step, evaluate,
save; ending.py exports and reports. Other files: checkpoint.py; recovery.py for out of memory;
signals.py, learning_rate.py, environment.py; log.py, plots.py, report.py and trackers.py. plan_command.py is
`python -m lowmem.plan`, api.py what `import lowmem` offers. Start with train.py.
"""
