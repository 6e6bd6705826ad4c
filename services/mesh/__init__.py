"""The local supervisor: one host, all processes of a mesh, no terminal in it.

It starts the services as processes of their own and knows them by their logs, their health and their exit codes only;
it imports none of them.
"""

from __future__ import annotations

from services.mesh.exits import MeshError, ServiceExit
from services.mesh.local_mesh import LocalMesh
from services.mesh.log_lines import LogLine
from services.mesh.options import MeshOptions

__all__ = ["LocalMesh", "LogLine", "MeshError", "MeshOptions", "ServiceExit"]
