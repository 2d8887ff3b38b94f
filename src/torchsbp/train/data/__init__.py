"""Data: sources of samples, the order in which they are read, and the processes that read them."""
