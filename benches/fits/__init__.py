"""Where data parallelism does not fit: hetspmd under limits of memory beside FSDP2 that is tuned by hand."""
