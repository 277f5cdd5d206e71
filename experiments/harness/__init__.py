"""What experiments share: rows of results, tables made of them, jobs that run in processes of their own."""
