"""The orca command."""
