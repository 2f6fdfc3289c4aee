"""The data sets: one file each, with its official source, its cache layout and its checks."""
