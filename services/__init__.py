"""The services of the mesh; none imports another (only cli and mesh see them all)."""
