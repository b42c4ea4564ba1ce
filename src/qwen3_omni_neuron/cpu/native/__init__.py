"""What is written in C, for the frames whose arithmetic is less than the calls of it from torch."""
