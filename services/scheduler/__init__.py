"""The scheduler: ORCA's engine master."""
