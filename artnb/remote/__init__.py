"""The same backend on another machine: `artnb serve` there (app.py), `RemoteBackend` here (backend.py)."""
