"""The library of experiments and tests: rows of results, tables of rows, jobs in processes, small trainings."""
