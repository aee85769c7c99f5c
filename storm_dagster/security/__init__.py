"""Identity and permission: signatures, tokens, TLS, peers of a socket, exposure."""
