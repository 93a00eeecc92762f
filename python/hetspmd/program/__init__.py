"""The representation of programs: instructions, collectives, schedule, buckets, lengths, layouts, and the proof."""
