"""The fastest of several plans, as measured."""
