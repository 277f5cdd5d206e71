"""Plans, and trains as far as possible, models of 125 million to 11 billion parameters."""
