"""Recording what every rank does in a step, and when."""
