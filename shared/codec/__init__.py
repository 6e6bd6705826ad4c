"""Messages to protobuf and back, one module for each seam inside the mesh.

With the servicers and the typed clients this is the only place that sees ``shared.pb``. The translation is total: what
comes from a peer of another version or from a stranger ends in ``ProtocolError``, never in a half-built message.
"""
