"""Library of experiments and tests: rows of results, tables, jobs in processes, small trainings."""
