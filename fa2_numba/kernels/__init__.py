"""One kernel file for each algorithm; none imports another."""
