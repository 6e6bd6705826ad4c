"""The gateway: the only service that clients reach."""
