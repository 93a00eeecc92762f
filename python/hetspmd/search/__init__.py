"""The search for the program of least step time: its space, prices, constraints, and the call of the solver."""
