"""From overrides to a request: compose, check, request."""
