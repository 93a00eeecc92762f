"""Running a plan: communicators, collectives, random numbers, the HAP module, simulation and verification."""
