"""Verification: all ranks in one process against one device."""
