"""The worker: one process per pipeline stage and tensor-parallel rank."""
