"""Does a whole training run, from the command line to the exit code. Start with train.py, which has the loop.

main.py parses the options. prepare.py turns settings into a model that is ready to train. api.py has the functions of
`import lowmem`. page.py makes report.html.
"""
