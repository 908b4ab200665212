"""Copies between L1 and L2; `kernels.table` says which two pools get."""
