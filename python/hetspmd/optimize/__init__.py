"""From a graph and a cluster to a plan: search and ratios in turns, candidates, segments, levels."""
