"""Rules: what may be sharded, op by op, and the Hoare triples that follow (design 4)."""
