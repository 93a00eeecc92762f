"""A cluster of unlike devices on one Linux machine, and measurements on it: what hetspmd predicts for a plan,
what the plan takes, and what today's data parallelism takes."""
