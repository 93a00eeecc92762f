"""Between the ranks: communicators, collectives with uneven parts, the roll call, failure detection, random numbers."""
