"""Does a whole training run, from the command line to the exit code. Start reading with train.py, which has the loop.

main.py parses the options (cli.py, options.py). prepare.py turns settings into a model that is ready to train, with
data, plan and weights. evaluation.py, saver.py and ending.py are the loop's helpers. api.py has the functions of
`import lowmem`. page.py makes report.html from the files of a run folder, with page.html as its template.
"""
