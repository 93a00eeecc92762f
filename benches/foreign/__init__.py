"""A survey: models and loops of other packages on unlike ranks, equal to one device or refused by name."""
