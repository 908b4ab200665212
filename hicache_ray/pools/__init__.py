"""L1 and L2 memory: pools, their layouts and sizes, and who owns which page."""
