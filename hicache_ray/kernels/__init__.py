"""Copies between L1 and L2: one table of io backends, host layouts and attention types (`kernels.dispatch`)."""
