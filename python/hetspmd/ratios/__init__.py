"""Sharding ratios by linear programming."""
