from models.conftest import fuse, registered

__all__ = ["fuse", "registered"]
