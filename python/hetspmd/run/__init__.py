"""Running a plan: the HAP module, its plans, shards, state dicts, clipping, scaling, and guards."""
