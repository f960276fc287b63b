"""HTTP control: routes, access control, request bodies and responses."""
