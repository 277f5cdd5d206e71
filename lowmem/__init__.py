"""Train every parameter of a decoder, exactly, under hard caps of GPU memory and RAM."""
