"""Models of 125 million to 11 billion parameters: what training them takes, planned, and trained as far as it goes."""
