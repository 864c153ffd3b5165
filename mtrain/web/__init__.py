"""The translator page: of a server, or with the Bergamot engine in the browser."""
