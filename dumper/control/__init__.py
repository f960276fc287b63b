"""Control: HTTP routes, access control, request bodies and responses."""
