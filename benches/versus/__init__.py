"""Is hetspmd faster than what people use today? DDP, FSDP2 and one device alone beside its plans."""
