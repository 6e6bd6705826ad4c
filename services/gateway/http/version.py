"""The version of this program, as installed."""

import importlib.metadata

__all__ = ["VERSION"]

VERSION = importlib.metadata.version("orca-mesh")
